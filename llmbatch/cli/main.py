"""The command `llmbatch`: arguments in, exit status out.

Standard output holds results alone, everything a person reads while waiting goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from llmbatch.cli.parser import ONLINE, make_parser
from llmbatch.errors import InputError, JobStopped, LLMBatchError, StoppedEarly, StorageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        arguments = vars(make_parser().parse_args(_with_form(sys.argv[1:] if argv is None else argv)))
        return int(_COMMANDS[arguments.pop("command")](arguments))
    except InputError as error:
        _say(str(error))
        return 2
    except RecursionError:
        _say("the input is nested too deeply to be read: flatten it")
        return 2
    except JobStopped as error:
        _say(str(error))
        return 143
    except LLMBatchError as error:
        _say(str(error))
        return 1
    except StoppedEarly:
        _say("stopped before any row was run: answers of earlier runs are kept, and the same command goes on with them")
        return 143
    except KeyboardInterrupt:
        _say("interrupted; what a job has answered is kept, and the same command goes on with it")
        return 130


def _with_form(words: Sequence[str]) -> list[str]:
    """Tell apart the two forms of `simulate`: with `--online` it is another command."""
    online = any(word == "--online" or word.startswith("--online=") for word in words)
    return [ONLINE, *words[1:]] if online and words[0] == "simulate" else list(words)


def _run(arguments: dict[str, Any]) -> int:
    from llmbatch.runtime.cancellation import StopRequest, heard

    as_json, quiet = arguments.pop("json"), arguments.pop("quiet")
    given = _given(arguments)
    stopping = StopRequest(given.pop("grace"))
    with heard(stopping), _quiet_libraries():
        from llmbatch.inference.progress import choose
        from llmbatch.jobs.job import run

        report = run(given.pop("inputs"), given.pop("output"), progress=choose(quiet=quiet), stopping=stopping, **given)
    if report.finished_before:
        _say(f"the output {report.output} is finished already; --restart starts over")
    if as_json:
        _print(json.dumps(report.to_dict()))
    elif not quiet and not report.finished_before:
        print(report.to_text(), file=sys.stderr)
    if report.rows and report.errors == report.rows:
        why = "" if report.first_error is None else f"; {report.first_error}"
        _say(
            f"every row failed ({report.rows:,}{why}): see the column error in {report.output}, or of a batch the "
            "file of errors beside it; mend the cause, and start over with --restart, which loses no answer"
        )
        return 3
    return 0


def _explain(arguments: dict[str, Any]) -> int:
    from llmbatch.jobs.explain import explain

    as_json = arguments.pop("json")
    given = _given(arguments)
    with _quiet_libraries():
        forecast = explain(given.pop("inputs"), **given)
    _print(json.dumps(forecast.to_dict()) if as_json else forecast.to_text())
    return 0


def _simulate(arguments: dict[str, Any]) -> int:
    from llmbatch.simulation.experiment import simulate

    as_json = arguments.pop("json")
    given = _given(arguments)
    with _quiet_libraries():
        report = simulate(given.pop("traces"), **given)
    _print(json.dumps(report.to_dict()) if as_json else report.to_text())
    return 0


def _simulate_online(arguments: dict[str, Any]) -> int:
    from llmbatch.simulation.online.experiment import simulate_online

    as_json = arguments.pop("json")
    given = _given(arguments)
    with _quiet_libraries():
        report = simulate_online(given.pop("online"), **given)
    _print(json.dumps(report.to_dict()) if as_json else report.to_text())
    return 0


def _serve(arguments: dict[str, Any]) -> int:
    from llmbatch.inference.progress import choose
    from llmbatch.serving.serve import serve

    quiet = arguments.pop("quiet")
    with _quiet_libraries():
        try:
            serve(progress=choose(quiet=quiet), **_given(arguments))
        except KeyboardInterrupt:
            _say("interrupted; batches that had not ended go on when the server starts again")
            return 130
    return 0


_COMMANDS = {
    "run": _run,
    "explain": _explain,
    "simulate": _simulate,
    ONLINE: _simulate_online,
    "serve": _serve,
}


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Collect the options that were given, so that defaults stand in one place."""
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


def _print(result: str) -> None:
    """Write to standard output. Who reads it may have gone. Raises StorageError where it cannot be written."""
    try:
        print(result, flush=True)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise StorageError(f"standard output must take what is printed, but it cannot be written: {error}") from None


def _say(sentence: str) -> None:
    print(f"llmbatch: {sentence}", file=sys.stderr)
