"""The rows that an engine has in flight, in a file that outlives its process.

A process that is killed loses its memory, but not the pages of a file that it had mapped: the kernel keeps them. So the
next process learns which rows must run again, and which of them may have killed the last one, and nothing is sent
anywhere while an engine runs.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype([("shard", "<u8"), ("row", "<u8"), ("occurrence", "<i4"), ("state", "<i4")])
RUNNING, ENDED = 1, 2  # 0: an empty slot
_SLOTS = 4096  # at first


class InFlightRows:
    """Rows that have begun and are not in the ledger yet, each in a slot of a file. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._slots = self._grown(_SLOTS)
        self._free = np.arange(_SLOTS)[::-1].astype(np.int64)
        self._top = _SLOTS  # of the stack of free slots

    def enter(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Note that rows (`ROW`, the state aside) begin; returns their slots."""
        with self._lock:
            while self._top < len(rows):
                size = len(self._slots)
                self._slots = self._grown(2 * size)
                self._free = np.concatenate((self._free[: self._top], np.arange(size, 2 * size)))
                self._top += size
            self._top -= len(rows)
            slots = self._free[self._top : self._top + len(rows)].copy()
            for name in ("shard", "row", "occurrence"):
                self._slots[name][slots] = rows[name]
            self._slots["state"][slots] = RUNNING
            return slots

    def end(self, slots: NDArray[np.int64]) -> None:
        """Note that the rows in these slots have their answers."""
        self._slots["state"][slots] = ENDED

    def leave(self, slots: NDArray[np.int64]) -> None:
        """Free these slots: the answers of their rows are safe."""
        with self._lock:
            self._slots["state"][slots] = 0
            if self._top + len(slots) > len(self._free):
                self._free = np.concatenate((self._free[: self._top], slots))
            self._free[self._top : self._top + len(slots)] = slots
            self._top += len(slots)

    def _grown(self, slots: int) -> NDArray[np.void]:
        with open(self._path, "ab") as file:
            os.truncate(file.fileno(), slots * ROW.itemsize)
        mapped: NDArray[np.void] = np.memmap(self._path, ROW, "r+", shape=(slots,))
        return mapped


def left_behind(path: Path) -> NDArray[np.void]:
    """Read the rows that were in flight when the process that wrote this file ended."""
    slots = np.fromfile(path, ROW)
    return slots[slots["state"] > 0]
