"""The public surface: its names, its signatures, and that functions, records and command line agree about options."""

from __future__ import annotations

import argparse
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import llmbatch
from llmbatch.choices import keywords_of
from llmbatch.cli.parser import make_parser
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.inference.keywords import AnswerArgs, BesideArgs, EngineArgs, OptionArgs, PromptArgs
from llmbatch.inference.options import Options
from llmbatch.jobs.options import DatasetArgs, ExplainArgs, InputArgs, JobArgs, JobOptions, RunArgs, SearchArgs
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.serving.options import ServeArgs, ServingArgs, ServingOptions
from llmbatch.simulation.online.options import OnlineArgs, OnlineOptions
from llmbatch.simulation.options import SimulationArgs, SimulationOptions
from tests.support.paths import ROOT

SIGNATURES = {
    "Advance": "(rows: 'int', tokens: 'int', errors: 'int' = 0) -> None",
    "LLMOperator": "(**options: 'Unpack[OptionArgs]') -> 'None'",
    "ParameterError": "(message: 'str', *, option: 'str | None' = None, value: 'object' = None) -> 'None'",
    "SamplingParams": "(*, max_tokens: 'int' = 512, temperature: 'float' = 0.0, top_p: 'float' = 1.0, top_k: 'int' = "
    "0, min_p: 'float' = 0.0, seed: 'int | None' = None, n: 'int' = 1, stop: 'tuple[str, ...]' = (), "
    "stop_token_ids: 'tuple[int, ...]' = (), min_tokens: 'int' = 0, ignore_eos: 'bool' = False, "
    "presence_penalty: 'float' = 0.0, frequency_penalty: 'float' = 0.0, repetition_penalty: 'float' "
    "= 1.0, logit_bias: 'tuple[tuple[int, float], ...]' = (), logprobs: 'int | None' = None, "
    "prompt_logprobs: 'int | None' = None, structured_outputs: 'Structure | None' = None) -> None",
    "StopRequest": "(grace: 'float' = 0.0) -> 'None'",
    "explain": "(inputs: 'Paths', **options: 'Unpack[ExplainArgs]') -> 'Forecast'",
    "map_dataset": "(ds: 'ray.data.Dataset', op: 'LLMOperator', *, concurrency: 'int | tuple[int, int] | None' = None, "
    "num_cpus: 'float | None' = None, num_gpus: 'float | None' = None, memory: 'float | None' = None, "
    "resources: 'dict[str, float] | None' = None, rows_per_shard: 'int' = 20000, plan: 'PlanName' = 'given', "
    "quiet: 'bool' = False) -> 'ray.data.Dataset'",
    "run": "(inputs: 'Paths', output: 'str | os.PathLike[str]', *, progress: 'Progress | None' = None, "
    "stopping: 'StopRequest | None' = None, **options: 'Unpack[RunArgs]') -> 'Report'",
    "serve": "(*, progress: 'Progress | None' = None, stopping: 'StopRequest | None' = None, **options: "
    "'Unpack[ServeArgs]') -> 'None'",
    "simulate": "(traces: 'Paths', **options: 'Unpack[SimulationArgs]') -> 'SimulationReport'",
}
FIGURES = ("Forecast", "Report", "SimulationReport")  # frozen, with `to_dict`
ERRORS = {
    "LLMBatchError": Exception,
    "InputError": ValueError,
    "DataError": ValueError,
    "ModelError": ValueError,
    "OtherCommandError": ValueError,
    "JobError": RuntimeError,
    "JobStopped": RuntimeError,
    "StorageError": RuntimeError,
    "StoppedEarly": KeyboardInterrupt,
}


def public(name: str) -> Any:
    return getattr(llmbatch, name)


def defaults_of(record: type) -> dict[str, object]:
    """The default of each field of a dataclass that has one."""
    return {each.name: each.default for each in fields(record)}


def flags_of(command: str) -> dict[str, argparse.Action]:
    """The flags of a command, by the keyword that each gives."""
    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices[command]
    return {action.dest: action for action in parser._actions if action.option_strings and action.dest != "help"}


def test_the_public_names_are_these() -> None:
    assert set(llmbatch.__all__) == {*SIGNATURES, *FIGURES, *ERRORS, "Progress", "__version__"}


@pytest.mark.parametrize(("name", "signature"), SIGNATURES.items())
def test_a_signature_stays(name: str, signature: str) -> None:
    made = public(name).__init__ if name == "LLMOperator" else public(name)
    assert str(inspect.signature(made)).replace("(self, ", "(") == signature


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_frozen_and_have_a_dict(name: str) -> None:
    assert public(name).__dataclass_params__.frozen
    assert callable(public(name).to_dict)


@pytest.mark.parametrize(("name", "base"), ERRORS.items())
def test_errors_have_their_bases(name: str, base: type[BaseException]) -> None:
    assert issubclass(public(name), base)
    assert name == "StoppedEarly" or issubclass(public(name), llmbatch.LLMBatchError)


@pytest.mark.parametrize("name", sorted({*SIGNATURES, *FIGURES, *ERRORS, "Progress"}))
def test_a_public_name_says_where_it_is_imported_from_and_is_found_there(name: str) -> None:
    assert public(name).__module__ == "llmbatch"
    assert pickle.loads(pickle.dumps(public(name))) is public(name)


def test_an_error_of_one_option_carries_its_name_and_value_also_to_another_process() -> None:
    with pytest.raises(ParameterError) as caught:
        Options.build(model="m", prompt="text", page_size=0)
    there = pickle.loads(pickle.dumps(caught.value))
    assert (there.option, there.value, str(there)) == ("page_size", 0, "page_size must be at least 1, got 0")


# Keywords, records and flags agree


def test_the_keywords_of_prompts_are_the_fields_of_their_record() -> None:
    defaults = defaults_of(PromptSource)
    assert list(PromptArgs.__annotations__) == list(defaults)
    for name, (_, keyword) in keywords_of(PromptArgs).items():
        assert keyword.default == defaults[name], name


def test_the_keywords_of_answers_have_the_defaults_of_sampling() -> None:
    sampling, options, keywords = defaults_of(SamplingParams), defaults_of(Options), keywords_of(AnswerArgs)
    assert sampling.keys() <= keywords.keys()
    assert keywords.keys() - sampling.keys() == {
        "sampling_params",
        "response_format",
        "continuation",
        "on_error",
        "row_timeout",
    }
    for name in sampling.keys() - {"stop", "stop_token_ids", "logit_bias"}:
        assert keywords[name][1].default == sampling[name], name
    for name in ("continuation", "on_error", "row_timeout"):
        assert keywords[name][1].default == options[name], name


def test_the_keywords_of_the_engine_are_the_other_fields_of_options() -> None:
    options, keywords = defaults_of(Options), keywords_of(EngineArgs)
    own = {"model", "source", "sampling", "sampling_column", "notes", "continuation", "on_error", "row_timeout"}
    assert keywords.keys() == options.keys() - own - BesideArgs.__annotations__.keys()
    assert defaults_of(EngineConfig).keys() <= keywords.keys()
    for name, (_, keyword) in keywords.items():
        assert keyword.default == options[name], name


@pytest.mark.parametrize(
    ("arguments", "record"),
    [
        (JobArgs, JobOptions),
        (SimulationArgs, SimulationOptions),
        (OnlineArgs, OnlineOptions),
        (ServingArgs, ServingOptions),
    ],
)
def test_keywords_are_the_fields_of_their_record(arguments: type, record: type) -> None:
    keywords, defaults = keywords_of(arguments), defaults_of(record)
    assert keywords.keys() - {"steps_out", "requests_out", "offline"} == defaults.keys()
    for name, default in defaults.items():
        assert keywords[name][1].default == default, name


def test_a_type_is_that_of_the_field() -> None:
    pairs = [(EngineArgs, Options), (JobArgs, JobOptions)]
    pairs += [(SimulationArgs, SimulationOptions), (OnlineArgs, OnlineOptions)]
    pairs += [(ServingArgs, ServingOptions)]
    for arguments, record in pairs:
        kinds = {each.name: each.type for base in record.__mro__[-2::-1] for each in fields(base)}
        for name, (kind, _) in keywords_of(arguments).items():
            given = kinds.get(name)
            assert given is None or isinstance(given, str) or given == kind, name


def test_each_function_takes_its_keywords_and_each_keyword_is_a_flag() -> None:
    parts = (PromptArgs, AnswerArgs, EngineArgs, BesideArgs)
    options = {"model"}.union(*(part.__annotations__ for part in parts))
    assert set(OptionArgs.__annotations__) == options
    assert set(DatasetArgs.__annotations__) == options | set(InputArgs.__annotations__)
    assert set(ExplainArgs.__annotations__) == {*DatasetArgs.__annotations__, *SearchArgs.__annotations__}
    assert set(RunArgs.__annotations__) == {*DatasetArgs.__annotations__, *JobArgs.__annotations__}
    assert OptionArgs.__required_keys__ == RunArgs.__required_keys__ == {"model"}
    assert flags_of("run").keys() == {*RunArgs.__annotations__, "output", "json", "quiet", "grace"}
    assert flags_of("explain").keys() == {*ExplainArgs.__annotations__, "json"}
    assert flags_of("simulate").keys() == {*SimulationArgs.__annotations__, "json"}
    assert flags_of("simulate --online").keys() == {*OnlineArgs.__annotations__, "online", "json"}
    assert set(ServeArgs.__annotations__) == {"model", *ServingArgs.__annotations__, *EngineArgs.__annotations__}
    assert flags_of("serve").keys() == {*ServeArgs.__annotations__, "quiet"} - {"output_tokens"}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("run", RunArgs),
        ("explain", ExplainArgs),
        ("simulate", SimulationArgs),
        ("simulate --online", OnlineArgs),
        ("serve", ServeArgs),
    ],
)
def test_a_flag_has_the_help_of_its_keyword_and_leaves_its_default_to_the_function(
    command: str, arguments: type
) -> None:
    flags = flags_of(command)
    for name, (_, keyword) in keywords_of(arguments).items():
        if (command, name) == ("serve", "output_tokens"):
            continue  # which it has no rows for
        if name != "overlap_exponent":  # which --sequential gives too
            assert flags[name].help == (keyword.off or keyword.text())
        assert flags[name].default is None


def test_flags_become_values_of_their_type() -> None:
    words = [
        "run",
        "in",
        "--output",
        "out",
        "--model",
        "m",
        "--prompt",
        "p",
        "--stop",
        "a",
        "--stop",
        "b",
        "--top-p",
        ".5",
    ]
    words += ["--kv-memory", "1KiB", "--no-preserve-order", "--restart", "--storage-options", '{"anon": true}']
    given = {name: value for name, value in vars(make_parser().parse_args(words)).items() if value is not None}
    assert given == {
        "command": "run", "inputs": ["in"], "output": "out", "model": "m", "prompt": "p", "stop": ["a", "b"],
        "top_p": 0.5, "kv_memory": 1024, "preserve_order": False, "restart": True,
        "storage_options": {"anon": True}, "json": False, "quiet": False, "grace": 20.0,
    }  # fmt: skip  # a table


@pytest.mark.parametrize(
    "program", ["import llmbatch\ndir(llmbatch)", "from llmbatch.cli.parser import make_parser\nmake_parser()"]
)
def test_names_and_help_load_no_library(program: str) -> None:
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) & {"torch", "pyarrow", "numba", "numpy", "ray", "transformers"} == set()


# Functions


def test_an_unknown_keyword_is_refused_by_every_function() -> None:
    calls: dict[str, Callable[..., object]] = {
        "run": lambda **given: llmbatch.run("in", "out", model="m", prompt="p", **given),
        "explain": lambda **given: llmbatch.explain("in", model="m", prompt="p", **given),
        "simulate": lambda **given: llmbatch.simulate("in", **given),
        "LLMOperator": lambda **given: llmbatch.LLMOperator(model="m", prompt="p", **given),
        "serve": lambda **given: llmbatch.serve(model="m", **given),
    }
    for name, call in calls.items():
        with pytest.raises(ParameterError, match=r"^an option must be one of .*, got 'promt'") as caught:
            call(promt="text")
        assert caught.value.option == "promt", name


def test_the_nearest_keyword_is_named_whatever_it_is_for() -> None:
    run: Any = llmbatch.run
    for given, near in (("restrt", "restart"), ("storage_option", "storage_options"), ("max_token", "max_tokens")):
        with pytest.raises(ParameterError, match=rf"got '{given}': did you mean {near}\?$"):
            run("in", "out", model="m", prompt="p", **{given: 1})
    explain: Any = llmbatch.explain
    with pytest.raises(ParameterError, match=r"got 'storage_option': did you mean storage_options\?$"):
        explain("in", model="m", prompt="p", storage_option={})
