"""The workers of this process: one for each configuration, whose engine one call at a time uses.

Calls come from many threads: Polars reads two frames of a query at once. A call that has nothing to run gives the
engine back, so that one may feed the other.

The C library keeps what an engine frees, in a heap of the thread that used it (docs/decisions/0007). Another thread has
another heap, so it first gives back what the one before has left: else each of many threads would keep as much.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.options import Options
from llmbatch.inference.table_worker import AnsweredTable, TableWorker
from llmbatch.remote.opening import open_worker
from llmbatch.system.tuning import give_back_freed_memory

_NUMBERS = re.compile(r"[\d,.]+")
_log = logging.getLogger("llmbatch")
_workers: dict[str, LockedWorker] = {}  # by configuration
_opening = threading.Lock()


class LockedWorker:
    """A worker, and who uses its engine."""

    def __init__(self, worker: TableWorker) -> None:
        self.worker = worker
        self.changed = threading.Condition()  # whether the engine is in use, and whatever its users wait for
        self._used = False
        self._thread: int | None = None  # that used it last
        self._told: set[str] = set()
        self._numbered = int.from_bytes(os.urandom(7), "little")  # another number in each process

    @contextmanager
    def engine(self, given_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for the engine and use it; False: the wait was `given_up`, which `changed` told of."""
        with self.changed:
            self.changed.wait_for(lambda: not self._used or given_up())
            if given_up():
                got = False
            else:
                got = self._used = True
        try:
            if got:
                self._leave_no_freed_memory()
            yield got
        finally:
            if got:
                with self.changed:
                    self._used = False
                    self.changed.notify_all()

    def _leave_no_freed_memory(self) -> None:
        """Give back what another thread freed that used the engine before this one."""
        last, self._thread = self._thread, threading.get_native_id()
        if last not in (None, self._thread):
            give_back_freed_memory()

    def number(self, rows: int) -> NDArray[np.uint64]:
        """Give rows numbers that no others have, uint64 [rows]: equal ones of two tables draw for themselves."""
        with self.changed:
            first = self._numbered
            self._numbered += rows
        return np.arange(first, first + rows, dtype=np.uint64)

    def answer(self, table: pa.Table) -> AnsweredTable:
        """Answer a table in one plan, when the engine is free; log what the user should know, once."""
        with self.engine():
            answered = self.worker.answer(table, keys=self.number(table.num_rows))
        for note in answered.report.notes:
            kind = _NUMBERS.sub("", note)  # some count the rows of a table
            if kind not in self._told:
                self._told.add(kind)
                _log.warning("%s", note)
        return answered


def worker_of(options: Options) -> LockedWorker:
    """Return the worker of a configuration: one process loads a model once."""
    key = repr(options)
    if key not in _workers:  # a call that has its worker does not wait for another to be opened
        with _opening:
            if key not in _workers:
                _workers[key] = LockedWorker(open_worker(options))
    return _workers[key]
