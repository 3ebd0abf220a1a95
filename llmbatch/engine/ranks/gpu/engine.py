"""The engine of the first rank of several devices, which is to others as one engine.

Each rank has a share of the weights, and some of the heads of keys and values. The first one packs batches, chooses all
tokens and keeps them; what it runs, the others run. They are told the packed batch before it is launched here, and get
its tokens over the devices, so that neither waits for a token to reach a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.followers import FollowedBatch
from llmbatch.engine.gpu.graphs.recorder import Recorder
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.messages import RankRecordings, RankScores
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step, StepResult


class ToldFollowers:
    """The other ranks of a team (`llmbatch.engine.gpu.followers.Followers`). Its methods raise RankLost."""

    def __init__(self, team: RankTeam, collectives: DeviceCollectives) -> None:
        self._team = team
        self._collectives = collectives

    def record(self, decodes: Sequence[int], mixed: Sequence[int], rates: Rates | None) -> None:
        """Have them record steps."""
        self._team.tell(RankRecordings(tuple(decodes), tuple(mixed), rates))

    def run(self, batch: FollowedBatch, ids: torch.Tensor) -> None:
        """Have them run a batch."""
        self._team.tell(replace(batch, packed=batch.packed.without_references()))
        self._collectives.give(ids)

    def score(self, states: torch.Tensor) -> None:
        """Have them put their heads to states."""
        self._team.tell(RankScores(tuple(states.shape), states.dtype))
        self._collectives.give(states.contiguous())


class AgreedTimes:
    """A recorder whose times are the first rank's on all (`Recorder`): what is kept by them must be the same."""

    def __init__(self, recorder: Recorder, collectives: DeviceCollectives, device: torch.device) -> None:
        self._recorder = recorder
        self._collectives = collectives
        self._device = device

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work on this rank's device."""
        return self._recorder.record(work)

    def seconds(self, repeat: Callable[[], None]) -> float:
        """Time it on all ranks, and take what the first one has found."""
        found = torch.tensor([self._recorder.seconds(repeat)], dtype=torch.float64, device=self._device)
        self._collectives.give(found)
        return float(found)


class RankedGpuEngine(GpuEngine):
    """Runs steps on a team of ranks. Where one of them dies it raises `RankLost`, and is of no more use."""

    def __init__(self, *given: Any, team: RankTeam, **named: Any) -> None:
        """Take what the engine of a device takes, and the team that its followers are."""
        super().__init__(*given, **named)
        self._team = team

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._team.pids

    def end(self) -> None:
        """End the other ranks."""
        self._team.end()

    def record(self, decodes: Iterable[int], mixed: Iterable[int] = (), rates: Rates | None = None) -> None:
        """Record steps on all devices, as `GpuEngine.record` does. Raises RankLost where a rank has ended."""
        try:
            super().record(decodes, mixed, rates)
            self._team.check()
        except RuntimeError as error:
            raise self._team.lost() or error from None

    def submit(self, step: Step) -> StepResult | None:
        """Queue a step on all devices, as `GpuEngine.submit` does."""
        with self._team.computing():
            return super().submit(step)

    def collect(self) -> StepResult:
        """Wait for the older queued step, as `GpuEngine.collect` does."""
        with self._team.computing():
            result = super().collect()
            self._team.check()  # where a rank has ended, NCCL returns what nobody has computed
            return result
