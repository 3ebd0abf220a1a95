"""The command `llmbatch`: arguments in, exit status out.

Status 0: done. 1: the job failed. 2: the command or its input is wrong. 130: interrupted. 143: asked to end (SIGTERM).
Standard output holds results alone, everything a person reads while waiting goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmbatch.errors import InputError, JobStopped, LLMBatchError, ParameterError
from llmbatch.options import ATTENTION, DTYPES, ENGINES, LOAD_FORMATS, ON_ERROR, OVERLAP
from llmbatch.order import POLICIES
from llmbatch.staging import COMPRESSIONS

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ParameterError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        arguments = vars(_parser().parse_args(argv))
        command = arguments.pop("command")
        return int(_COMMANDS[command](arguments))
    except InputError as error:
        _say(str(error))
        return 2
    except JobStopped as error:
        _say(str(error))
        return 143
    except LLMBatchError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted; what a job has answered is kept, and the same command goes on with it")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="llmbatch", description="Run a large language model over a dataset.")
    from llmbatch import __version__

    parser.add_argument("--version", action="version", version=f"llmbatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    run = commands.add_parser("run", help="answer every row of a dataset and write the answers")
    _add_inputs(run)
    run.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help="a folder, or one .parquet, .jsonl[.gz|.zst] file; a path or a URL",
    )
    _add_options(run)
    _add_job(run)
    run.add_argument("--quiet", action="store_true", help="no progress")
    explain = commands.add_parser("explain", help="say what run would do, without loading weights")
    _add_inputs(explain)
    _add_options(explain)
    simulate = commands.add_parser("simulate", help="run request traces through planner and scheduler, by a clock")
    _add_simulation(simulate)
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", metavar="IN", help="Parquet or JSONL files, folders, globs; paths or URLs")
    add("--storage-options", type=_json_object, metavar="JSON", help="passed to fsspec for input and output")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="a folder, a .gguf file or a hub name")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="COL", help="the text column that holds the prompts")
    prompts.add_argument("--template", metavar="T", help="a prompt made of columns: 'Q: {question}'")
    prompts.add_argument("--messages", metavar="COL", help="a column of OpenAI messages")
    add("--chat", action="store_true", help="wrap each prompt as a user message through the chat template")
    add("--system", metavar="TEXT", help="system message of each chat; implies --chat")
    add("--chat-template-kwargs", type=_json_object, metavar="JSON", help="passed to the chat template")
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer (512)")
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token (0)")
    add("--top-p", type=float, metavar="P", help="probability mass to sample from (1)")
    add("--top-k", type=int, metavar="K", help="likeliest tokens to sample from, 0 for all (0)")
    add("--seed", type=int, metavar="S", help="makes sampled answers repeatable")
    add("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    add("--ignore-eos", action="store_true", default=None, help="always generate --max-tokens")
    add("--sampling-params", metavar="COL", help="a column of structs or JSON that overrides these per row")
    add("--order", choices=POLICIES, default="blend", help="the order in which rows are run (blend)")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:N; auto: a GPU where there is one (auto)")
    add("--attention", choices=ATTENTION, default="auto", help="kernels on a GPU (auto: the first that works)")
    add("--overlap", choices=OVERLAP, default="auto", help="how a GPU runs a step (auto: as measured there)")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights and KV (auto: bfloat16 where it is fast)",
    )
    add("--kv-memory", type=_bytes, metavar="BYTES", help="memory for KV pages, for example 2e9 or 4GiB")
    add("--page-size", type=int, metavar="N", help="tokens in a KV page (8 on a processor, 16 on a GPU)")
    add("--max-running", type=int, metavar="N", help="most rows in flight (512 on a processor, 2048 on a GPU)")
    add("--step-tokens", type=int, metavar="N", help="tokens of a step (decided in closed loop)")
    add(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy fills random weights, for benchmarks",
    )
    add("--engine", choices=ENGINES, default="torch", help="simulated runs no model and writes placeholder text")
    add("--output-tokens", metavar="COL", help="a column of the tokens that the simulated engine generates")
    add("--row-timeout", type=float, metavar="S", help="most seconds from a row's first step to its last")
    add(
        "--on-error",
        choices=ON_ERROR,
        default="column",
        help="what a failed row does: fill its error column, or end the job",
    )
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--json", action="store_true", help="print one JSON object and nothing else to standard output")


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--id-column", metavar="COL", help="unique values that tell rows apart, also in a changed input")
    add("--restart", action="store_true", help="start over, whatever an earlier run left")
    add("--overwrite", action="store_true", help="start over, and replace Parquet files of others at OUT too")
    add("--retry-errors", action="store_true", help="answer the rows again that failed")
    add("--no-preserve-order", action="store_false", dest="preserve_order", help="publish parts as they are full")
    add("--max-error-rate", type=float, metavar="R", help="end the job when more of its rows have failed (0 to 1)")
    add("--window-rows", type=int, metavar="N", help="rows that are planned together (by memory)")
    add("--compression", choices=COMPRESSIONS, default="zstd", help="of Parquet (zstd)")
    add("--grace", type=float, default=20.0, metavar="S", help="seconds that rows in flight have after SIGTERM (20)")


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="Parquet files of requests (docs/simulate.md)")
    add("--mix", metavar="MIX", help="table2-1 to table2-4, wide-1, or DENSITY,SHARING; needs three traces")
    add("--requests", type=int, metavar="N", help="draws of a mix (100,000), or the first rows of the traces (all)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="the cap that users give: longer answers are cut (as the pool allows)",
    )
    add("--order", "--policy", choices=POLICIES, default="blend", help="the order in which requests are run (blend)")
    add("--step-tokens", type=int, metavar="N", help="tokens of a step (2048; blend decides in closed loop)")
    add("--model-shape", default="llama-3-8b", metavar="M", help="a known shape, or a folder with a config.json")
    add("--hardware", default="a100-80gb", metavar="H", help="a known GPU (a100-80gb)")
    add("--kv-memory", type=_bytes, metavar="BYTES", help="memory for KV pages (the card's, less weights and 4 GB)")
    add("--page-size", type=int, metavar="N", help="tokens in a KV page (16)")
    add("--hash-block", type=int, metavar="N", help="tokens in a block of hash_ids (16)")
    add("--tensor-parallel", type=int, metavar="N", help="cards that act as one (1)")
    add("--data-parallel", type=int, metavar="N", help="replicas that share the requests (1)")
    add("--lengths", choices=("known", "sampled"), help="whether the scheduler is told the answers' lengths (sampled)")
    add("--sample-fraction", type=float, metavar="F", help="requests that run first to learn lengths (0.01)")
    add("--law", choices=("paper", "bytes"), help="how a step's floor is charged (paper)")
    laws = parser.add_mutually_exclusive_group()
    laws.add_argument("--overlap-exponent", type=float, metavar="E", help="of the overlap of compute and memory (4)")
    laws.add_argument("--sequential", action="store_const", const=1.0, dest="overlap_exponent", help="no overlap")
    add("--cascade", action="store_true", help="decodes read a long prefix that many share once a step")
    add("--seed", type=int, metavar="S", help="of draws, samples and random orders (0)")
    add("--json", action="store_true", help="print one JSON object and nothing else to standard output")
    add("--steps-out", metavar="F", help="write a Parquet file with a row a step")
    add("--requests-out", metavar="F", help="write a Parquet file with a row a request")


def _run(arguments: dict[str, Any]) -> int:
    from llmbatch.job import run
    from llmbatch.progress import choose
    from llmbatch.stopping import Stopping

    as_json, quiet = arguments.pop("json"), arguments.pop("quiet")
    given = _given(arguments)
    stopping = Stopping(given.pop("grace"))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stopping.ask())
    with _quiet_libraries():
        report = run(given.pop("inputs"), given.pop("output"), progress=choose(quiet=quiet), stopping=stopping, **given)
    if report.finished_before:
        _say(f"the output {report.output} is finished already; --restart starts over")
    if as_json:
        print(json.dumps(report.to_dict()))
    elif not quiet and not report.finished_before:
        _say(
            f"{report.rows:,} rows ({report.errors:,} errors, {report.duplicates:,} duplicates, "
            f"{report.rows_resumed:,} found answered) in "
            f"{report.seconds:.1f} s, {report.tokens_per_second:,.0f} tokens/s, prefix sharing "
            f"{report.prefix_sharing:.1%} of {report.prefix_sharing_optimal:.1%} possible, written to {report.output}"
        )
    return 0


def _explain(arguments: dict[str, Any]) -> int:
    from llmbatch.job import explain

    as_json = arguments.pop("json")
    given = _given(arguments)
    with _quiet_libraries():
        forecast = explain(given.pop("inputs"), **given)
    print(json.dumps(forecast.to_dict()) if as_json else forecast.to_text())
    return 0


def _simulate(arguments: dict[str, Any]) -> int:
    from llmbatch.experiment import Experiment

    as_json = arguments.pop("json")
    outputs = {name: arguments.pop(f"{name}_out") for name in ("steps", "requests")}
    for path in filter(None, outputs.values()):
        if not Path(path).absolute().parent.is_dir():
            raise ParameterError(f"the folder of {path!r} must exist: create it first")
    with _quiet_libraries():
        simulation = Experiment(**_given(arguments)).run()
    for table, path in ((simulation.steps_table, outputs["steps"]), (simulation.requests_table, outputs["requests"])):
        if path is not None:
            import pyarrow.parquet as pq

            pq.write_table(table(), path)
    report = simulation.report
    print(json.dumps(report.to_dict()) if as_json else report.to_text())
    return 0


_COMMANDS = {"run": _run, "explain": _explain, "simulate": _simulate}


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, so that defaults stand in one place."""
    return {name: value for name, value in arguments.items() if value is not None}


@contextlib.contextmanager
def _quiet_libraries() -> Any:
    """Keep libraries from writing to standard output, and from bars and advice of their own; show our warnings."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the tracebacks of errors that it raises
    ours, shown = logging.getLogger("llmbatch"), logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("llmbatch: %(message)s"))
    ours.addHandler(shown)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ours.removeHandler(shown)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _bytes(text: str) -> int:
    """A number of bytes: 2e9, 2000000000, 2GB, 4GiB."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgti")
    unit = lowered[len(digits) :]
    try:
        return int(float(digits) * _UNITS.get(unit, 1)) if unit in ("", *_UNITS) else int(unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 2e9 or 4GiB, got {text!r}") from None


def _say(sentence: str) -> None:
    print(f"llmbatch: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
