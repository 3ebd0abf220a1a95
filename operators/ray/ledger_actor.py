"""The actor of Ray in which a job's ledger and its exchange live, and how actors with engines call it."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmbatch.inference.progress import Lines, Silence
from llmbatch.operators.ray.ledger import Ledger, ShardHistory
from llmbatch.operators.ray.lending.exchange import RowExchange
from llmbatch.operators.ray.lending.loans import Beat, NoExchange, Orders


class LedgerActor(Ledger):
    """The ledger and the exchange in a process beside the driver; its lines are shown there under this name."""

    def __init__(self, folder: str, rows: int, quiet: bool) -> None:
        super().__init__(folder, rows, Silence() if quiet else Lines(sys.stderr))
        self._folder = folder
        self._exchange = RowExchange()

    def beat(self, beat: Beat) -> Orders:
        """Take note of how an engine is; returns what it is to do."""
        return self._exchange.beat(beat)

    def moved(self) -> int:
        """Return how many rows were lent by one engine to another."""
        return self._exchange.moved

    def __repr__(self) -> str:
        return "llmbatch"

    def __ray_shutdown__(self) -> None:
        """End; Ray calls this when nobody knows this actor any more."""
        shutil.rmtree(self._folder, ignore_errors=True)


def start_ledger(rows: int, quiet: bool) -> Any:
    """Start a ledger on the driver's node. It ends with the last dataset that knows it."""
    folder = tempfile.mkdtemp(prefix="llmbatch-ledger-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(LedgerActor)
    lasting = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return actor.options(scheduling_strategy=here, **lasting).remote(folder, rows, quiet)


class LedgerReports:
    """The ledger's actor, called and waited for (`llmbatch.operators.ray.shard_call.Reports`)."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def begin(self, shard: int) -> ShardHistory:
        """Take note that a call begins to work on a shard."""
        known: ShardHistory = ray.get(self._ledger.begin.remote(shard))
        return known

    def report(self, shard: int, call: int, answers: pa.RecordBatch, *, last: bool) -> None:
        """Keep rows of a shard that were answered in a call."""
        ray.get(self._ledger.report.remote(shard, call, answers, last=last))

    def keep_begun(self, shard: int, call: int, begun: pa.RecordBatch) -> None:
        """Keep what the unfinished answers of a shard have so far."""
        ray.get(self._ledger.keep_begun.remote(shard, call, begun))


class LedgerBeats:
    """The exchange in the ledger's actor, called and waited for (`lending.loans.LoanExchange`)."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def beat(self, beat: Beat) -> Orders:
        """Tell how an engine is; returns what it is to do. Raises `NoExchange`."""
        try:
            orders: Orders = ray.get(self._ledger.beat.remote(beat))
        except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
            raise NoExchange from error
        return orders
