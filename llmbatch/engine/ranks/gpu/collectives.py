"""Ranks on devices give each other sums and logits by torch.distributed: NCCL on GPUs, gloo on a processor.

What is queued waits on the device's own stream, so the host goes on. Before the others are there each of them is taken
to give what this one does: so a share can be measured alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from llmbatch.engine.gpu.graphs.recorder import release_cached
from llmbatch.engine.ranks.gpu.meeting import Meeting
from llmbatch.engine.ranks.reports import RankLost


class DeviceCollectives:
    """The other ranks (`Collectives`)."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._meeting: Meeting | None = None

    def join(self, meeting: Meeting, device: torch.device) -> None:
        """Meet the others, once all have loaded their shares. Raises RankLost."""
        if device.type == "cuda":
            release_cached()  # NCCL takes its memory from the device, and not from what torch keeps for itself
        meeting.join(self.rank, self.ranks, device)
        self._meeting = meeting

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks, in its type. Raises RankLost, as the others do, where that is known."""
        if self._meeting is None:
            return x
        total = x.contiguous()
        self._queue(lambda group: group.allreduce([total], _here(AllreduceOptions())))
        return total

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Collect `x`, of one shape everywhere, on all ranks."""
        if self._meeting is None:
            return [x] * self.ranks
        own = x.contiguous()
        found = own.new_empty(self.ranks, *own.shape)
        options = _here(AllgatherOptions())
        self._queue(lambda group: group._allgather_base(found.view(-1), own.view(-1), options))
        return list(found)

    def give(self, x: torch.Tensor) -> None:
        """Write the first rank's `x` to that of all others."""
        if self._meeting is not None:
            self._queue(lambda group: group.broadcast([x], _here(BroadcastOptions())))

    def _queue(self, begin: Callable[[Any], Any]) -> None:
        """Let the device, or this thread where there is none, wait for the other ranks."""
        assert self._meeting is not None
        try:
            work = self._meeting.begin(begin)
            if work is not None:
                work.wait()
        except RankLost:
            raise
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
                raise  # of this device
            raise RankLost.by_error(error) from error


def _here(options: Any) -> Any:
    """Let a collective run on the stream that it is queued on, and not on one of the group's."""
    options.asyncOp = False
    return options
