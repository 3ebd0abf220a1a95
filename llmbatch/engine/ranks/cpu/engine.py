"""The engine of the first rank, which is to others as one engine: it chooses all tokens, and tells ranks each step.

A step runs as on one process, up to the call of the model: what that is called with goes to all ranks. They run their
shares of it side by side, and add up what they have behind attention and MLP of each layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.ranks.cpu.messages import RankStates, RankStep
from llmbatch.engine.ranks.cpu.shares import head_of
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step, StepResult


class RankedCpuEngine:
    """Runs steps on a team of ranks. Where one of them dies it raises `RankLost`, and is of no more use."""

    def __init__(self, engine: CpuEngine, module: nn.Module, team: RankTeam) -> None:
        """Take the engine of the first rank, the share that it runs, and the other ranks, which have met."""
        self._engine = engine
        self._team = team
        self._module = module
        head_of(module).send = lambda states: team.tell(RankStates(states))

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._team.pids

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget what an interrupted job left in slots."""
        self._engine.begin(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self._engine.rebind(requests)

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since."""
        self._engine.extend(requests, rows)

    def execute(self, step: Step) -> StepResult:
        """Compute the step on all ranks, keep the sampled tokens, and return which sequences have finished."""

        def tell(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
            self._team.tell(RankStep.of(given["input_ids"], given["position_ids"], given["llmbatch"], step.copies))

        hook = self._module.register_forward_pre_hook(tell, with_kwargs=True)
        try:
            with self._team.computing():
                return self._engine.execute(step)
        finally:
            hook.remove()

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens of the answer in a slot so far, as far as they are known."""
        return self._engine.generated(slot)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        return self._engine.pop_tokens(slot)

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Return what is told of a request's answer and of its prompt, before `pop_tokens`; None where nothing is."""
        return self._engine.logprobs(slot, request)
