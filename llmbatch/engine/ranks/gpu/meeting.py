"""The group of a team's ranks on devices, and where they find each other.

The group is the library's own, apart from any that the program has. NCCL does not notice that a process has ended: its
kernels wait for it for ever, and what was waited for in vain is returned as if it were whole. So another thread aborts
the group then (`leave`), and whoever computes asks afterwards whether a rank has ended (`RankTeam.check`). An abort and
a collective that is being queued must not meet: there is a lock for both. But an abort ends the kernels at once, and
then waits for the end of all graphs that hold a sum. So a collective does not wait for it: who is told that a rank was
lost lets go of the graphs.

A process that ends does not take its group apart, since that may wait for other ranks: ranks end without ado
(`reporting`), and the first one keeps what it has to the end of the process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from llmbatch.engine.ranks.reports import RankLost

_DIST: Any = torch.distributed  # its types say little
_HOST: Final = "127.0.0.1"
_PAUSE: Final = 0.01  # seconds between looks at who has loaded the model, and at whether a rank has ended
_OPENING: Final = timedelta(seconds=120)  # to reach all other ranks, once they have
_NEVER: Final = timedelta(days=365)  # ranks that have nothing to do wait for the first one
_LOCKED_S: Final = 1.0  # that an abort waits for a collective which is being queued
# While a group is made: an abort, or an error of another rank, must not end the process, and no wait the host.
_NCCL: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "NCCL_SOCKET_IFNAME": "lo",  # all are on one host
}


class Meeting:
    """The first rank keeps a `port` of the loopback; others come there."""

    def __init__(self, port: int = 0) -> None:
        """Open it as the first rank, or, with its port, as another one. Raises RankLost where it is no more."""
        try:
            if port:
                self._store = _DIST.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
            else:
                self._store = _open_store()
        except RuntimeError as error:
            raise RankLost("the first rank does not answer") from error
        self.port: int = self._store.port
        self._group: Any = None
        self._lock = threading.Lock()
        self._left = False
        _meetings.add(self)

    def join(self, rank: int, ranks: int, device: torch.device) -> None:
        """Say that a rank has loaded its share, and open the group once all have. Raises RankLost."""
        self._store.set(f"loaded-{rank}", "")
        everyone = [f"loaded-{other}" for other in range(ranks)]
        try:
            while not self._store.check(everyone):
                if self._left:
                    raise RankLost("a rank does not answer")
                time.sleep(_PAUSE)
            with _environment(_NCCL if device.type == "cuda" else {}):
                self._group = _open_group(self._store, rank, ranks, device)
                if self._left:
                    raise RankLost("a rank does not answer")
                self._group.allreduce([torch.zeros(1, device=device)]).wait()  # connects: what fails there fails now
        except _DIST.DistError as error:
            raise RankLost.by_error(error) from error

    def begin(self, collective: Callable[[Any], Any]) -> Any:
        """Queue a collective on the group; returns what to wait for, if there is anything. Raises RankLost."""
        while not self._lock.acquire(timeout=_PAUSE):
            self._check()
        try:
            self._check()
            return collective(self._group)
        finally:
            self._lock.release()

    def leave(self) -> None:
        """End all waiting for ranks, from another thread: one has ended."""
        self._left = True
        if self._group is None or _at_exit:
            return
        locked = self._lock.acquire(timeout=_LOCKED_S)
        try:
            with suppress(RuntimeError):  # what waits for it finds out by itself
                self._group.abort()
        finally:
            if locked:
                self._lock.release()

    def _check(self) -> None:
        if self._left:
            raise RankLost("a rank has ended")

    def keep(self) -> None:
        """Keep the group to the end of the process."""
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


_meetings: weakref.WeakSet[Meeting] = weakref.WeakSet()
_at_exit: list[bool] = []  # filled once the process ends


def keep_at_exit() -> None:
    """Let no group be aborted or taken apart as the process ends; call it when all that ends processes is known."""
    atexit.unregister(_keep_all)
    atexit.register(_keep_all)


def _keep_all() -> None:
    _at_exit.append(True)
    for meeting in list(_meetings):
        meeting.keep()


def _open_store() -> Any:
    """Open the store of the first rank, at the loopback alone: torch's own would listen everywhere."""
    listening = socket.socket()
    listening.bind((_HOST, 0))
    listening.listen()
    port = listening.getsockname()[1]
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    return _DIST.TCPStore(_HOST, port, **given)


def _open_group(store: Any, rank: int, ranks: int, device: torch.device) -> Any:
    if device.type == "cuda":
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        return _DIST.ProcessGroupNCCL(store, rank, ranks, options)
    gloo: Any = _DIST.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_HOST)]
    options._timeout = _OPENING
    group = gloo(store, rank, ranks, options)
    group._set_default_timeout(_NEVER)
    return group


@contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    """Have these variables for a while."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
