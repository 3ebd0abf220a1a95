"""Chooses what answers tables: a model of this process, or endpoints elsewhere."""

from __future__ import annotations

from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Progress
from llmbatch.inference.table_worker import TableWorker


def open_worker(options: Options, progress: Progress | None = None) -> TableWorker:
    """Open what answers tables by these options. Raises InputError, and JobError where an endpoint is not there."""
    if not options.beside:
        from llmbatch.inference.worker import Worker

        return Worker.open(options, progress)
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ParameterError(
            "beside needs httpx, which is not installed: pip install 'llmbatch[serve]'", option="beside"
        ) from None
    from llmbatch.remote.worker import RemoteWorker

    return RemoteWorker.open(options, progress)
