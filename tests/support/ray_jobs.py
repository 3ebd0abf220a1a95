"""Ray jobs for tests: datasets, their ledgers, and the processes of their actors, which can be killed."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray

from llmbatch.operators.ray import dataset as operators_ray
from llmbatch.operators.ray import sharding
from llmbatch.operators.ray.in_flight import RUNNING, left_behind
from llmbatch.operators.ray.ledger import Counts
from llmbatch.operators.ray.sharding import Shards

# Ray keeps as many processes as there are CPUs, those of actors among them: tasks would wait for new ones each time.
_KEPT: dict[str, Any] = {"num_workers_soft_limit": 16, "idle_worker_killing_time_threshold_ms": 600_000}


def start(**options: Any) -> None:
    """Ray on this machine, or where `address` says, with room for small actors."""
    if "address" not in options:
        options |= {"address": "local", "_system_config": _KEPT}
    ray.init(**{"log_to_driver": False, "configure_logging": False, **options})
    ray.data.DataContext.get_current().enable_progress_bars = False


def rows_of(count: int, *, groups: int = 7) -> pa.Table:
    """Rows of a few shared prefixes, the last row of each text of its own."""
    texts = [f"{'prefix ' * 6}{i % groups}: question {i}" for i in range(count)]
    return pa.table({"id": np.arange(count), "text": texts})


def answered(ds: ray.data.Dataset) -> pa.Table:
    """All rows of a dataset, by id."""
    return pa.concat_tables(ray.get(ds.to_arrow_refs())).sort_by("id")


class Job:
    """`map_dataset`, whose ledger a test may look into, cut as a test says."""

    def __init__(
        self,
        ds: ray.data.Dataset,
        op: Any,
        *,
        cut: Callable[..., Shards] = sharding.cut,
        lends_at_once: bool = False,
        **options: Any,
    ) -> None:
        """Take what `map_dataset` takes. What `lends_at_once` does so on the same cores, however soon it ends."""
        module: Any = operators_ray
        before = module.start_ledger, module.cut

        def kept(rows: int, quiet: bool) -> Any:
            self.ledger = before[0](rows, quiet)
            if lends_at_once:
                ray.get(self.ledger.__ray_call__.remote(_lend_at_once))
            return self.ledger

        module.start_ledger, module.cut = kept, cut
        try:
            self.ds = operators_ray.map_dataset(ds, op, quiet=True, **options)
        finally:
            module.start_ledger, module.cut = before

    def moved(self) -> int:
        """How many rows one engine has lent to another."""
        moved: int = ray.get(self.ledger.moved.remote())
        return moved

    def counts(self) -> Counts:
        """What the ledger has counted."""
        counts: Counts = ray.get(self.ledger.counts.remote())
        return counts


def _lend_at_once(_: Any) -> None:
    """Change the exchange in the process of a ledger."""
    from llmbatch.operators.ray.lending import exchange
    from llmbatch.operators.ray.lending.place import Place

    exchange.LEAST_SECONDS = 0.0  # type: ignore[misc]
    Place.is_apart = lambda self, other: True  # type: ignore[method-assign]


def flights() -> dict[int, NDArray[np.void]]:
    """The rows that actors have in their engines, by process id."""
    found = {}
    for path in Path(tempfile.gettempdir()).glob("llmbatch-flight-*"):
        process = int(path.name.rpartition("-")[2])
        if _is_actor(process) and ((rows := left_behind(path))["state"] == RUNNING).any():
            found[process] = rows
    return found


def _is_actor(process: int) -> bool:
    """Whether it is a process of our Ray: other tests may run another beside.

    The files of those that were killed stay, and their numbers are given again.
    """
    try:
        ours = Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::")
        while ours and process != os.getpid():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
            ours = process > 1
    except FileNotFoundError:
        return False
    return ours


def when_running(rows: int, then: Callable[[int], None]) -> threading.Thread:
    """Wait in a thread until an actor has at least so many rows in its engine, then act on its process."""

    def watch() -> None:
        chosen: list[int] = []

        def found() -> bool:
            chosen.extend(pid for pid, there in flights().items() if (there["state"] == RUNNING).sum() >= rows)
            return bool(chosen)

        until(found)
        then(chosen[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def until(holds: Callable[[], bool]) -> None:
    """Look again and again until something holds."""
    never = threading.Event()
    while not holds():
        never.wait(0.05)


def kill(process: int) -> None:
    """End a process as the kernel does when memory runs out."""
    os.kill(process, signal.SIGKILL)
