"""`serve`: a model behind an HTTP endpoint, until it is asked to end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Unpack

from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, Silence, checked
from llmbatch.inference.worker import Worker
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.serving.options import ServeArgs, ServingOptions, split_options
from llmbatch.system.cache import cache_folder

_LIBRARIES: Final = ("starlette", "uvicorn", "prometheus_client", "python_multipart")
_BACKLOG: Final = 2048  # connections that wait to be accepted
_USUAL: Final = 512  # tokens of a prompt


def serve(
    *, progress: Progress | None = None, stopping: StopRequest | None = None, **options: Unpack[ServeArgs]
) -> None:
    """Answer requests in OpenAI's form over HTTP, and batches of them in what is left of the engine.

    `options` are those of the endpoint (`docs/options.md`), and of the engine as `LLMOperator` has them. It listens at
    `host` and `port`, and needs the extra `serve`. Requests are answered first: the first token of each is wanted
    within `ttft` seconds, and with `tpot` no step takes longer than that. Requests with `service_tier: "flex"` and
    batches (`/v1/files`, `/v1/batches`) get what is left. Files and batches are kept in `state_dir`; a batch that was
    not finished goes on when an endpoint with the same folder starts.

    It returns when another thread calls `stopping.ask()`, and ends so on SIGTERM, where it raises `JobStopped`, and on
    Ctrl-C. What is running has `grace` seconds to end. `progress` is told where it listens.

    Raises `InputError` if the command is wrong or the port is in use, and `JobError` if the engine fails.

    >>> llmbatch.serve(model="Qwen/Qwen3-0.6B", port=8000, ttft=0.5)  # doctest: +SKIP
    """
    serving, rest = split_options({**options})
    _check_libraries()
    from llmbatch.serving.access import read_keys
    from llmbatch.serving.batches.records import StateFolder
    from llmbatch.serving.server import run_server

    progress = Silence() if progress is None else checked(progress)
    stopping = StopRequest.of(stopping)
    keys, built = read_keys(serving.api_key_file), Options.of_batch(**rest)
    with _listening(serving) as listener, contextlib.closing(StateFolder.open(_state(serving, built))) as state:
        worker = Worker.open(built, progress)
        built.source.make_ready(worker.tokenizer)
        worker.load()
        _check_seconds(serving, worker)
        for note in (*worker.notes, *_late_prompts(serving, worker)):
            progress.say(note)
        run_server(serving, rest, worker, state.path, keys, listener, progress, stopping)


serve.__module__ = "llmbatch"  # which it is imported from


def _check_libraries() -> None:
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise ParameterError(
            f"serve needs {' and '.join(missing)}, which cannot be imported: pip install 'llmbatch[serve]'"
        )


@contextlib.contextmanager
def _listening(serving: ServingOptions) -> Iterator[socket.socket]:
    """Take the port before anything is loaded. Raises ParameterError."""
    host, port = serving.host, serving.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ParameterError(
            f"host must be an address of this machine, got {host!r}: {reason}", option="host", value=host
        ) from None
    family, address = found[0][0], found[0][4]
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ParameterError(
            f"port must be one that {host} has free, got {port}: {reason.lower()}, choose another (--port)",
            option="port", value=port,
        ) from None  # fmt: skip  # as few lines as may be
    with listener:
        yield listener


def _state(serving: ServingOptions, options: Options) -> Path:
    """Return the folder of files and batches: that which is given, or one for the model."""
    if serving.state_dir is not None:
        return Path(serving.state_dir).expanduser()
    return cache_folder() / "serve" / hashlib.sha256(options.model.encode()).hexdigest()[:16]


def _check_seconds(serving: ServingOptions, worker: Worker) -> None:
    """Refuse limits that this device cannot keep with one request alone. Raises ParameterError."""
    least = worker.cost.step_time(1, 1.0, 1.0, 1)
    for name in ("ttft", "tpot"):
        given: Any = getattr(serving, name)
        if given is not None and given < least:
            raise ParameterError(
                f"{name} must be at least {least:.2g} s, which a step of one token takes on this device, got {given:g}",
                option=name, value=given,
            )  # fmt: skip  # as few lines as may be


def _late_prompts(serving: ServingOptions, worker: Worker) -> tuple[str, ...]:
    """Say if a prompt of usual length takes longer than `ttft` with nothing beside it."""
    tokens = min(_USUAL, worker.model.context_length)
    seconds = worker.cost.step_time(tokens, tokens * (tokens + 1) / 2, float(tokens), 1)
    if seconds <= serving.ttft:
        return ()
    return (f"a prompt of {tokens:,} tokens takes {seconds:.2g} s on this device, more than ttft={serving.ttft:g}",)
