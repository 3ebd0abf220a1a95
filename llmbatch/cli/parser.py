"""The arguments of each command: a flag for each keyword of the function that it calls."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final, Literal, NoReturn, Protocol, get_args, get_origin

from llmbatch.arguments import nearest
from llmbatch.choices import Keyword, keywords_of
from llmbatch.cli.values import counts, json_object, number, number_of_bytes, prices, seconds, sizes, whole_number
from llmbatch.errors import ParameterError
from llmbatch.inference.keywords import AnswerArgs, BesideArgs, EngineArgs, OptionArgs, PromptArgs
from llmbatch.jobs.options import InputArgs, JobArgs, SearchArgs
from llmbatch.serving.options import ServeArgs, ServingArgs
from llmbatch.simulation.online.options import OnlineArgs
from llmbatch.simulation.options import SimulationArgs

# By what stands for the value in a usage line.
_FORMS: Final = {
    "BYTES": number_of_bytes,
    "JSON": json_object,
    "SECONDS": seconds,
    "NAME:N,...": counts,
    "NAME=D,...": prices,
    "memory=SIZE,...": sizes,
}
_NUMBERS: Final = {int: whole_number, float: number}
_GRACE: Final = 20.0  # seconds
_STATUSES = """exit status:
  0    done
  1    the job failed; what it answered is kept
  2    the command or its input is wrong; nothing was begun
  3    done, but every row failed
  130  interrupted (Ctrl-C); what is answered is kept, and a second Ctrl-C does not wait for that
  143  ended by SIGTERM; rows in flight had --grace seconds to end
"""


ONLINE: Final = "simulate --online"  # the command that `simulate` is with this flag
_PROMPTS: Final = "[--prompt COL | --template T | --messages COL | --turns COL]"
_EPILOG = """exit status:
  0    done
  1    failed
  2    the command or its input is wrong
"""


_SERVING: Final = """exit status:
  1    the engine failed
  2    the command is wrong, or the port is in use; nothing was begun
  130  ended by Ctrl-C; what was running had --grace seconds to end, and a second Ctrl-C does not wait for that
  143  ended by SIGTERM, likewise
"""


class FlagGroup(Protocol):
    """A parser, or a group of its flags."""

    def add_argument(self, *flags: str, **settings: Any) -> Any:
        """Add a flag."""
        ...


class _Parser(argparse.ArgumentParser):
    """Takes flags by their whole names, and says what is wrong in one sentence."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.help_command = f"{self.prog} --help"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices if each != ONLINE]
            near = nearest(str(value), known)
            meant = f": did you mean {near}?" if near else ""
            raise argparse.ArgumentError(action, f"must be one of {', '.join(known)}, got {value!r}{meant}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is not known with the nearest flag of this command."""
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = {_name(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
            named = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
            near = nearest(_name(named), flags)
            meant = f": did you mean {flags[near]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return given, unknown

    def error(self, message: str) -> NoReturn:
        raise ParameterError(f"{message} (see {self.help_command})")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command `llmbatch`."""
    parser = _Parser(
        prog="llmbatch",
        description="Run a large language model over a dataset.",
        epilog=_STATUSES,
    )
    from llmbatch._version import __version__

    parser.add_argument("--version", action="version", version=f"llmbatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    run = commands.add_parser(
        "run",
        help="answer every row of a dataset and write the answers",
        usage=f"%(prog)s IN [IN ...] --output OUT --model M {_PROMPTS} [options]",
        description="Answer every row of a dataset, and write the rows with their answers. Defaults are in brackets.",
        epilog=_STATUSES,
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
        usage=f"%(prog)s IN [IN ...] --model M {_PROMPTS} [options]",
        description="Say what run would do, without loading weights. Defaults are in brackets.",
        epilog=_EPILOG,
    )
    _add_inputs(explain)
    _add_options(explain)
    _add(explain.add_argument_group("devices elsewhere"), SearchArgs)
    _add_simulations(commands, parser.prog)
    serve = commands.add_parser(
        "serve",
        help="answer requests in OpenAI's form over HTTP, and batches in what they leave",
        usage="%(prog)s --model M [options]",
        description="Answer requests in OpenAI's form over HTTP, until SIGTERM or Ctrl-C. Defaults are in brackets.",
        epilog=_SERVING,
    )
    _add_serving(serve)
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="IN", help="Parquet or JSONL files, folders, globs; paths or URLs")
    _add(parser, InputArgs)


def _add_options(parser: argparse.ArgumentParser) -> None:
    model = keywords_of(OptionArgs)["model"]
    _add_flag(parser, "model", *model, required=True)
    group = parser.add_argument_group("prompts, by one of the first four; an OpenAI batch has its own")
    prompts = group.add_mutually_exclusive_group()
    for name, (kind, keyword) in keywords_of(PromptArgs).items():
        _add_flag(prompts if name in ("prompt", "template", "messages", "turns") else group, name, kind, keyword)
    _add(parser.add_argument_group("answers"), AnswerArgs)
    _add(parser.add_argument_group("engine"), EngineArgs)
    _add(parser.add_argument_group("endpoints, in place of an engine"), BesideArgs)
    _add_json(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else, to standard output"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    _add(group, JobArgs)
    group.add_argument(
        "--grace",
        type=number,
        default=_GRACE,
        metavar="S",
        help=f"seconds that rows in flight have after SIGTERM ({_GRACE:g})",
    )


def _add_simulations(commands: Any, prog: str) -> None:
    """Add both forms of `simulate`."""
    simulate = commands.add_parser(
        "simulate",
        help="run request traces through planner and scheduler, by a clock",
        usage="%(prog)s TRACE [TRACE ...] [options]\n       %(prog)s --online TRACE [options] (see --online x --help)",
        description="Run request traces through planner and scheduler, by a clock. Defaults are in brackets.",
        epilog=_EPILOG,
    )
    _add_simulation(simulate)
    online = commands.add_parser(
        ONLINE,
        prog=f"{prog} simulate",
        usage="%(prog)s --online TRACE [--offline TRACE ...] [options]",
        description="Run online requests by the clock, a job beside them. Defaults are in brackets.",
        epilog=_EPILOG,
    )
    online.help_command = f"{prog} simulate --online x --help"
    _add_online(online)


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="Parquet files of requests (docs/simulate.md)")
    _add_clocked(parser, SimulationArgs)


def _add_online(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--online", required=True, metavar="TRACE", help="online requests: a trace, or a distribution of lengths"
    )
    _add_clocked(parser, OnlineArgs)


def _add_clocked(parser: argparse.ArgumentParser, arguments: type) -> None:
    """Add the flags of a simulation."""
    laws = parser.add_mutually_exclusive_group()
    for name, (kind, keyword) in keywords_of(arguments).items():
        if name == "offline":
            parser.add_argument("--offline", nargs="+", action="extend", metavar="TRACE", help=keyword.text())
        elif name == "overlap_exponent":
            _add_flag(laws, name, kind, keyword)
            laws.add_argument("--sequential", action="store_const", const=1.0, dest=name, help="no overlap")
        else:
            _add_flag(parser, name, kind, keyword)
    _add_json(parser)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    _add_flag(parser, "model", *keywords_of(ServeArgs)["model"], required=True)
    _add(parser.add_argument_group("endpoint"), ServingArgs)
    _add(parser.add_argument_group("engine"), EngineArgs, but=("output_tokens",))
    parser.add_argument("--quiet", action="store_true", help="say nothing but what went wrong")


def _add(group: FlagGroup, arguments: type, *, but: Sequence[str] = ()) -> None:
    """Add a flag for each keyword of a TypedDict but some."""
    for name, (kind, keyword) in keywords_of(arguments).items():
        if name not in but:
            _add_flag(group, name, kind, keyword)


def _add_flag(group: FlagGroup, name: str, kind: Any, keyword: Keyword, **settings: Any) -> None:
    """Add the flag of a keyword. It has no default: what is not given is left to the function."""
    flag, taken = f"--{name.replace('_', '-')}", get_args(kind) or (kind,)
    if bool in taken:
        is_on = keyword.default is True
        if is_on:
            flag = f"--no-{name.replace('_', '-')}"
        group.add_argument(
            flag,
            dest=name,
            action="store_const",
            const=not is_on,
            default=None,
            help=keyword.off or keyword.text(),
            **settings,
        )
        return
    if get_origin(kind) is Literal:
        settings["choices"] = taken
    else:
        settings["metavar"] = keyword.metavar
    items = [get_args(each)[0] for each in taken if get_origin(each) is get_origin(Sequence[Any])]
    items = [item for item in items if isinstance(item, type)]  # mappings are one JSON text, not a flag for each
    if items:
        settings["action"] = "append"
    settings["type"] = _FORMS.get(keyword.metavar or "") or next(
        (form for each, form in _NUMBERS.items() if each in (*taken, *items)), str
    )
    group.add_argument(flag, *keyword.aliases, dest=name, help=keyword.text(), **settings)
