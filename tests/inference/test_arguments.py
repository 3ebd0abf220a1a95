"""What is given to the public functions is checked at once, whatever its type."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmbatch
from llmbatch.errors import InputError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.operators.llm import LLMOperator
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.runtime.cancellation import StopRequest
from tests.support.jobs import Job, contents

LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 7}, "model must be text or a Path, got 7"),
        ({"model": b"m"}, "model must be text or a Path, got b'm'"),
        ({"model": "m\0"}, "model must hold no NUL, which no path can, got 'm\\x00'"),
        ({"prompt": 7}, "prompt must be text, got 7"),
        ({"prompt": None, "template": "{a}\udcff"},
         "template must be valid UTF-8, got '{a}\\udcff' (surrogates not allowed)"),
        ({"system": b"Be brief."}, "system must be text, got b'Be brief.'"),
        ({"chat": "yes"}, "chat must be true or false, got 'yes'"),
        ({"chat": 1}, "chat must be true or false, got 1"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be true or false, got 'no'"),
        ({"sampling_params": 3}, "sampling_params must be a mapping, SamplingParams or the name of a column, got 3"),
        ({"output_tokens": 3, "engine": "simulated"}, "output_tokens must be text, got 3"),
        ({"order": ["blend"]},
         "order must be one of blend, dual-scan, dfs, sort, density, random, input, got ['blend']"),
        ({"device": 0}, "device must be auto, cpu, cuda or cuda:N, got 0"),
        ({"kv_memory": 2.5}, "kv_memory must be a whole number, got 2.5"),
        ({"kv_memory": True}, "kv_memory must be a whole number, got True"),
        ({"kv_memory": "4GiB"}, "kv_memory must be a whole number, got '4GiB'"),
        ({"kv_memory": float("nan")}, "kv_memory must be a whole number, got nan"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_running": 2**31}, "max_running must be at most 2147483647, got 2147483648"),
        ({"step_tokens": -1}, "step_tokens must be at least 1, got -1"),
        ({"row_timeout": float("nan")}, "row_timeout must be a finite number, got nan"),
        ({"row_timeout": "1"}, "row_timeout must be a finite number, got '1'"),
        ({"row_timeout": 0}, "row_timeout must be above 0 seconds, got 0"),
        ({"on_error": None}, "on_error must be one of column, raise, got None"),
    ],
)  # fmt: skip  # arguments in groups
def test_an_option_of_a_wrong_type_is_refused_at_birth(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Options.build(**{"model": "m", "prompt": "text", **options})
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"now": datetime.date(2024, 1, 2)},
         "chat_template_kwargs['now'] must be null, a boolean, a number, text, a list "
         "or a mapping, got datetime.date(2024, 1, 2): it is kept as JSON beside the answers"),
        ({"a": [{1}]}, "chat_template_kwargs['a'][0] must be null, a boolean, a number, text, a list or a mapping, "
         "got {1}: it is kept as JSON beside the answers"),
        ({"f": len}, "chat_template_kwargs['f'] must be null, a boolean, a number, text, a list or a mapping, "
         "got <built-in function len>: it is kept as JSON beside the answers"),
        ({1: 2}, "chat_template_kwargs must have texts as its keys, got 1"),
        ({"a": float("nan")}, "chat_template_kwargs['a'] must be a finite number, got nan"),
        ({"a": 2**70}, "chat_template_kwargs['a'] must be at most 9223372036854775807, got 1180591620717411303424"),
        ({"a": "\ud800"}, "chat_template_kwargs['a'] must be valid UTF-8, got '\\ud800' (surrogates not allowed)"),
        ([1], "chat_template_kwargs must be a mapping, got [1]"),
        (LOOP, "chat_template_kwargs must not be nested so deeply: chat_template_kwargs goes into itself, or nearly"),
    ],
)  # fmt: skip  # arguments in groups
def test_keywords_of_a_chat_template_are_what_json_holds(kwargs: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Options.build(model="m", messages="m", chat_template_kwargs=kwargs)
    assert str(caught.value) == said


def test_a_length_that_nobody_gave_is_said_where_answers_are_generated() -> None:
    assert Options.build(model="m", prompt="text").notes == (
        "max_tokens is not given: answers end after at most 512 tokens",
    )
    assert Options.build(model="m", prompt="text", continuation="more").notes == ()


def test_they_are_kept_as_json_gives_them_back_so_that_a_resume_finds_them_equal() -> None:
    source = PromptSource(messages="m", chat_template_kwargs={"a": (1, 2.5), "b": {"c": (None, True)}})
    assert source.chat_template_kwargs == {"a": [1, 2.5], "b": {"c": [None, True]}}


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.binary(max_size=2),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.sampled_from([np.int64(3), np.float32("nan"), np.True_, 3.5, "\ud800", "a\0", Path("m"), object(), len]),
)  # fmt: skip  # arguments in groups
FIELDS = sorted({*Options.__dataclass_fields__, *PromptSource.__dataclass_fields__} - {"source", "sampling", "notes"})


@given(st.sampled_from([*FIELDS, "sampling_params", "max_tokens", "stop"]), ANYTHING)
@settings(max_examples=600)
def test_whatever_an_option_is_it_is_taken_or_refused_in_a_sentence(name: str, value: Any) -> None:
    built = None
    with contextlib.suppress(ParameterError):
        built = Options.build(**{"model": "m", "prompt": "text", name: value})
    for field in [] if built is None else Options.__dataclass_fields__:
        if field not in ("source", "sampling"):
            assert type(getattr(built, field)) in (bool, int, float, str, type(None), tuple), field


@given(
    st.sampled_from([
        "inputs", "output", "id_column", "restart", "overwrite", "retry_errors", "preserve_order", "max_error_rate",
        "window_rows", "compression", "storage_options",
    ]),
    ANYTHING.filter(lambda value: value is not None),
)  # fmt: skip  # arguments in groups
@settings(max_examples=300)
def test_whatever_a_keyword_of_run_is_it_is_refused_before_anything_is_looked_for(name: str, value: Any) -> None:
    given = {"inputs": "/nowhere/in.parquet", "output": "/nowhere/out", "model": "m", "prompt": "text", name: value}
    with pytest.raises(InputError):
        llmbatch.run(**given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window_rows": 3.5}, "window_rows must be a whole number, got 3.5"),
        ({"window_rows": True}, "window_rows must be a whole number, got True"),
        ({"window_rows": 0}, "window_rows must be at least 1, got 0"),
        ({"max_error_rate": float("nan")}, "max_error_rate must be a finite number, got nan"),
        ({"max_error_rate": 1.5}, "max_error_rate must lie in [0, 1], got 1.5"),
        ({"restart": 1}, "restart must be true or false, got 1"),
        ({"preserve_order": "no"}, "preserve_order must be true or false, got 'no'"),
        ({"id_column": 3}, "id_column must be text, got 3"),
        ({"storage_options": "anon"}, "storage_options must be a mapping with texts as its keys, got 'anon'"),
        ({"compression": "brotli"}, "compression must be one of auto, zstd, snappy, gzip, lz4, none, got 'brotli'"),
        ({"output": "a\0b"}, "output must hold no NUL, which no path can, got 'a\\x00b'"),
        ({"output": "\ud800"}, "output must hold no half characters, which no path can, got '\\ud800'"),
        ({"output": 7}, "output must be text or a Path, got 7"),
    ],
)
def test_a_keyword_of_run_of_a_wrong_type_leaves_nothing_behind(job: Job, options: dict[str, Any], said: str) -> None:
    before = contents(job.folder)
    with pytest.raises(ParameterError) as caught:
        job.run(**options)
    assert str(caught.value) == said
    assert contents(job.folder) == before


def test_a_simulated_job_has_no_more_pages_than_a_device_may_have(job: Job) -> None:
    given: dict[str, Any] = {"engine": "simulated", "kv_memory": 10**15}
    said = r"^kv_memory must hold at most 16,777,216 pages of 8 tokens, got 1e\+15 bytes, which hold "
    with pytest.raises(ParameterError, match=said):
        job.run(**given)
    with pytest.raises(ParameterError, match=said):
        llmbatch.explain(job.source, model=job.model, prompt="text", **given)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (b"in.parquet", "inputs must be text or a Path, got b'in.parquet'"),
        ([1], "inputs must be text or a Path, got 1"),
        (pa.table({"a": [1]}), "inputs must be files, got a Table: LLMOperator answers tables"),
        ("in\0.parquet", "inputs must hold no NUL, which no path can, got 'in\\x00.parquet'"),
        ("\ud800", "inputs must hold no half characters, which no path can, got '\\ud800'"),
    ],
)
def test_inputs_of_a_wrong_type_are_refused_by_run_and_explain(inputs: Any, said: str) -> None:
    for call in (lambda: llmbatch.run(inputs, "out", model="m", prompt="p"),
                 lambda: llmbatch.explain(inputs, model="m", prompt="p")):  # fmt: skip  # arguments in groups
        with pytest.raises(ParameterError) as caught:
            call()
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("grace", "said"),
    [
        (float("nan"), "grace must be a finite number, got nan"),
        (-1, "grace must be at least 0 seconds, got -1"),
        ("1", "grace must be a finite number, got '1'"),
    ],
)
def test_a_grace_is_a_time(grace: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StopRequest(grace)
    assert str(caught.value) == said


def test_paths_may_be_paths_everywhere(job: Job) -> None:
    simulated = {**job.options, "window_rows": None}
    simulated.pop("window_rows")
    model: Any = Path(job.model)
    report = llmbatch.run(job.source, job.out, model=model, **simulated)
    assert (report.rows, report.errors, report.model) == (60, 0, job.model)
    assert llmbatch.run([job.source], job.out, model=model, **simulated).finished_before
    assert llmbatch.explain(job.folder.glob("*.parquet"), model=model, **simulated).rows == 60
    operator: Any = LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=2)
    assert operator(pa.table({"text": ["a"]})).num_rows == 1
