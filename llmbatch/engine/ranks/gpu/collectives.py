"""Ranks on devices give each other sums and logits by torch.distributed: NCCL on GPUs, gloo on a processor.

They meet in a group of their own, apart from any that the program has. NCCL does not notice that a process has ended:
its kernels wait for ever, and what was waited for in vain is returned as if it were whole. So another thread aborts the
group then (`leave`), and whoever computes asks afterwards whether it did (`RankTeam.check`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from llmbatch.engine.ranks.reports import RankLost

_DIST: Any = torch.distributed  # its types say little
_HOST: Final = "127.0.0.1"
_PAUSE: Final = 0.01  # seconds between looks at who has loaded the model
_OPENING: Final = timedelta(seconds=120)  # to reach all other ranks, once they have
_NEVER: Final = timedelta(days=365)  # ranks that have nothing to do wait for the first one


class Meeting:
    """The group of a team's ranks, and where they find each other: the first one keeps a `port` of the loopback."""

    def __init__(self, port: int = 0) -> None:
        """Open it as the first rank, or, with its port, as another one. Raises RankLost where it is no more."""
        try:
            self._store = _DIST.TCPStore(_HOST, port, is_master=port == 0, wait_for_workers=False)
        except RuntimeError as error:
            raise RankLost("the first rank does not answer") from error
        self.port: int = self._store.port
        self._group: Any = None
        self._left = False

    def join(self, rank: int, ranks: int, device: torch.device) -> Any:
        """Say that a rank has loaded its share, and return the group of all once all have. Raises RankLost."""
        self._store.set(f"loaded-{rank}", "")
        everyone = [f"loaded-{other}" for other in range(ranks)]
        try:
            while not self._store.check(everyone):
                if self._left:
                    raise RankLost("a rank does not answer")
                time.sleep(_PAUSE)
            self._group = _open_group(self._store, rank, ranks, device)
        except _DIST.DistError as error:
            raise RankLost("a rank does not answer") from error
        return self._group

    def leave(self) -> None:
        """End all waiting for ranks, from another thread: one has ended."""
        self._left = True
        if self._group is not None:
            with suppress(RuntimeError):  # what waits for it finds out by itself
                self._group.abort()


def _open_group(store: Any, rank: int, ranks: int, device: torch.device) -> Any:
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # by default an abort ends the process
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


class DeviceCollectives:
    """The other ranks (`Collectives`). Before they are joined each gives what this one does: for measurements."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._group: Any = None

    def join(self, meeting: Meeting, device: torch.device) -> None:
        """Meet the others, once all have loaded their shares. Raises RankLost."""
        self._group = meeting.join(self.rank, self.ranks, device)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks, in its type. Raises RankLost, as the others do, where that is known."""
        if self._group is None:
            return x
        total = x.contiguous()
        _queue(lambda: self._group.allreduce([total]))
        return total

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect `x`, of one shape everywhere, on all ranks."""
        if self._group is None:
            return [x] * self.ranks
        found = list(x.new_empty(self.ranks, *x.shape))
        _queue(lambda: self._group.allgather([found], [x.contiguous()]))
        return found

    def give(self, x: torch.Tensor) -> None:
        """Write the first rank's `x` to that of all others."""
        if self._group is not None:
            _queue(lambda: self._group.broadcast(x, 0))


def _queue(begin: Callable[[], Any]) -> None:
    """Let the device, or this thread where there is none, wait for the other ranks."""
    try:
        begin().wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost(f"a rank does not answer: {str(error).splitlines()[0]}") from error
