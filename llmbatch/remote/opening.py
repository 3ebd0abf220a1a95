"""Chooses what answers tables: a model of this process, or endpoints elsewhere."""

from __future__ import annotations

import time

from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress, Silence
from llmbatch.inference.table_worker import TableWorker


def open_worker(options: Options, progress: Progress | None = None) -> TableWorker:
    """Open what answers tables by these options. Raises InputError, and JobError where an endpoint is not there."""
    if options.beside:
        return _open_remote(options, progress or Silence())
    from llmbatch.inference.worker import Worker

    return Worker.open(options, progress)


def _open_remote(options: Options, progress: Progress) -> TableWorker:
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ParameterError(
            "beside needs httpx, which is not installed: pip install 'llmbatch[serve]'", option="beside"
        ) from None
    from llmbatch.remote.discovery import discover, read_key
    from llmbatch.remote.request_worker import RequestWorker
    from llmbatch.remote.windows.worker import WindowWorker

    begun = time.perf_counter()
    key = read_key(options.api_key_file)
    found = [discover(url, key, options.model) for url in options.beside]
    others = [one.url for one in found if one.windows is None]
    if others and len(others) < len(found):
        ours = next(one.url for one in found if one.windows is not None)
        raise ParameterError(
            f"beside must name endpoints of one kind, but {ours} is one of llmbatch and {others[0]} is not: "
            "run a job at one kind",
            option="beside",
            value=options.beside,
        )
    for url in others:
        progress.say(f"{url} is no llmbatch endpoint: rows go to it one by one, in the order of their prompts")
    seconds = time.perf_counter() - begun
    if others:
        return RequestWorker(options, key, seconds)
    about = found[0].windows
    assert about is not None
    for one in found:
        if one.windows != about:
            raise ParameterError(
                f"beside must name endpoints of one model, but {found[0].url} and {one.url} have other files of "
                f"{options.model!r}: run a job at those that have the same",
                option="beside",
                value=options.beside,
            )
    return WindowWorker(options, key, about, progress, seconds)
