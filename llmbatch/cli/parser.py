"""The arguments of each command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from llmbatch.choices import (
    ATTENTION,
    CHANGED_ROWS,
    COMPRESSIONS,
    DTYPES,
    ENGINES,
    LOAD_FORMATS,
    ON_ERROR,
    OVERLAP,
    POLICIES,
)
from llmbatch.cli.values import json_object, number_of_bytes
from llmbatch.errors import ParameterError

_STATUSES = """exit status:
  0    done
  1    the job failed; what it answered is kept
  2    the command or its input is wrong; nothing was begun
  3    done, but every row failed
  130  interrupted (Ctrl-C); what is answered is kept, and a second Ctrl-C does not wait for that
  143  ended by SIGTERM; rows in flight had --grace seconds to end
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ParameterError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command `llmbatch`."""
    parser = _Parser(
        prog="llmbatch",
        description="Run a large language model over a dataset.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from llmbatch._version import __version__

    parser.add_argument("--version", action="version", version=f"llmbatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    run = commands.add_parser(
        "run",
        help="answer every row of a dataset and write the answers",
        usage="%(prog)s IN [IN ...] --output OUT --model M (--prompt COL | --template T | --messages COL) [options]",
        description="Answer every row of a dataset, and write the rows with their answers. Defaults are in brackets.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_inputs(run)
    run.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help="a folder, or one .parquet, .jsonl[.gz|.zst] file; a path or a URL",
    )
    _add_options(run)
    _add_job(run)
    run.add_argument("--quiet", action="store_true", help="say nothing but what went wrong")
    explain = commands.add_parser(
        "explain",
        help="say what run would do, without loading weights",
        usage="%(prog)s IN [IN ...] --model M (--prompt COL | --template T | --messages COL) [options]",
        description="Say what run would do, without loading weights. Defaults are in brackets.",
    )
    _add_inputs(explain)
    _add_options(explain)
    simulate = commands.add_parser("simulate", help="run request traces through planner and scheduler, by a clock")
    _add_simulation(simulate)
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("inputs", nargs="+", metavar="IN", help="Parquet or JSONL files, folders, globs; paths or URLs")
    add("--storage-options", type=json_object, metavar="JSON", help="passed to fsspec for input and output")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="a folder, a .gguf file or a hub name")
    group = parser.add_argument_group("prompts, by one of the first three")
    prompts = group.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="COL", help="the text column that holds the prompts")
    prompts.add_argument("--template", metavar="T", help="a prompt made of columns: 'Q: {question}'")
    prompts.add_argument("--messages", metavar="COL", help="a column of OpenAI messages")
    add = group.add_argument
    add("--chat", action="store_true", help="wrap each prompt as a user message through the chat template")
    add("--system", metavar="TEXT", help="system message of each chat; implies --chat")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="passed to the chat template")
    add = parser.add_argument_group("answers").add_argument
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer (512)")
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token; above it, tokens are drawn (0)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the likeliest tokens that have this probability together (1)",
    )
    add("--top-k", type=int, metavar="K", help="draw from so many likeliest tokens, 0: from all (0)")
    add("--seed", type=int, metavar="S", help="draw the same answers each time")
    add("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    add("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens in every answer")
    add("--sampling-params", metavar="COL", help="a column of structs or JSON that overrides the above for its row")
    add(
        "--on-error",
        choices=ON_ERROR,
        default="column",
        help="what a failed row does: fill its column error, or end the job (column)",
    )
    add("--row-timeout", type=float, metavar="S", help="most seconds that a row's steps may take together (no limit)")
    add = parser.add_argument_group("engine").add_argument
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
    add(
        "--kv-memory",
        type=number_of_bytes,
        metavar="BYTES",
        help="memory for KV pages, for example 2e9 or 4GiB (by free memory)",
    )
    add("--page-size", type=int, metavar="N", help="tokens in a KV page (8 on a processor, 16 on a GPU)")
    add("--max-running", type=int, metavar="N", help="most rows in flight (512 on a processor, 2048 on a GPU)")
    add("--step-tokens", type=int, metavar="N", help="tokens of a step (decided step by step)")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights, for benchmarks (auto)")
    add("--engine", choices=ENGINES, default="torch", help="simulated: no model runs, answers are placeholders (torch)")
    add("--output-tokens", metavar="COL", help="a column of the tokens that the simulated engine generates")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else, to standard output"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("job").add_argument
    add(
        "--id-column",
        metavar="COL",
        help="a column of unique values: rows are known by them, also when the input has changed (by position)",
    )
    add("--restart", action="store_true", help="start over, whatever an earlier run left")
    add("--overwrite", action="store_true", help="start over, and replace Parquet files of others at OUT too")
    add("--retry-errors", action="store_true", help="answer the rows again that failed")
    add(
        "--changed-rows",
        choices=CHANGED_ROWS,
        default="refuse",
        help="what becomes of answered rows that read otherwise now: refuse the job, or answer them again (refuse)",
    )
    add(
        "--no-preserve-order",
        action="store_false",
        dest="preserve_order",
        help="publish each part as soon as it is full, its rows in the order in which they finish",
    )
    add(
        "--max-error-rate",
        type=float,
        metavar="R",
        help="end the job when a larger share of its rows has failed, 0 to 1 (1)",
    )
    add("--window-rows", type=int, metavar="N", help="rows that are read and planned together (by memory)")
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
    add(
        "--kv-memory",
        type=number_of_bytes,
        metavar="BYTES",
        help="memory for KV pages (the card's, less weights and 4 GB)",
    )
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
