"""Engines by the clock that run in turn, the one whose clock is behind first: so each run is the same.

What an engine runs is a shard on its way through its scheduler, as it is when it runs alone
(`llmbatch.runtime.shard_run`). That has a thread of its own, which goes on only while it is told to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.even_ends import RowsLeft
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.loops.step_loop import LengthObservations
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.scheduler.scheduler import Scheduler

_LOT: Final = 32  # steps that a replica takes at most before another one may
_LEAST: Final = 1e-9  # seconds of a step
_SHARE: Final = 0.01  # of its time so far, that they take at most: decisions see replicas at nearly the same moment


@dataclass(frozen=True, slots=True)
class EngineRun:
    """A run of some rows on devices that run as one."""

    devices: tuple[int, ...]
    begins: float  # s
    generated: NDArray[np.int32]  # by row: tokens of its answer that were there
    loop: SimulatedLoop
    run: ShardRun

    @property
    def ends(self) -> float:
        """When its last step so far ended, in seconds."""
        return self.begins + self.loop.seconds


class PausedLoop(SimulatedLoop):
    """A loop that lets others have a turn after each lot of steps."""

    def __init__(self, lengths: NDArray[np.int32], cost: CostModel, pause: Callable[[], None]) -> None:
        """Take as long as `cost` says for answers of these lengths; call `pause` after each lot."""
        super().__init__(lengths, cost)
        self._pause = pause
        self._lot = 1

    def run(self, scheduler: Scheduler, steps: int) -> LengthObservations:
        """Advance as `SimulatedLoop` does, and pause on the way."""
        until, before = scheduler.steps + steps, int(self.log.counts[0].ended)
        while scheduler.steps < until and not scheduler.done:
            first, begun = scheduler.steps, self.seconds
            super().run(scheduler, min(self._lot, until - first))
            each = (self.seconds - begun) / max(scheduler.steps - first, 1)
            self._lot = int(min(max(_SHARE * self.seconds / max(each, _LEAST), 1), _LOT))
            self._pause()
        return self.ended_since(before)


class TurnThread:
    """A thread that runs only while it is told to go on."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self.ended = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let it run until it pauses or has ended; raises what it raised."""
        self._go.release()
        self._paused.acquire()
        if self._failed is not None:
            raise self._failed

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go.acquire()
        try:
            work(self._pause)
        except BaseException as error:  # raised again where it is waited for
            self._failed = error
        self.ended = True
        self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()


class TurnEngine:
    """Devices that run as one: what they run now, and until when their clock has come."""

    def __init__(self, devices: tuple[int, ...], clock: float = 0.0) -> None:
        """Have nothing to run at first; `clock` is in seconds."""
        self.devices = devices
        self.clock = clock
        self._part: EngineRun | None = None
        self._turns: TurnThread | None = None

    @property
    def running(self) -> EngineRun:
        """What it runs."""
        assert self._part is not None, "it has gone on once"
        return self._part

    def left(self, cost: CostModel) -> RowsLeft | None:
        """Count what is left, at a cost; None while that is not known."""
        part = self._part
        return None if part is None else part.run.left(cost, part.loop.ended_since(0).requests)

    def begin(self, part_of: Callable[[Callable[[], None]], EngineRun]) -> None:
        """Begin with what `part_of` makes of a function that is to be called where others may have a turn."""
        self._part = None

        def work(pause: Callable[[], None]) -> None:
            self._part = part_of(pause)
            self._part.run.run()

        self._turns = TurnThread(work)

    def go_on(self) -> bool:
        """Take a lot of steps; whether all has ended."""
        assert self._turns is not None, "it has begun"
        self._turns.go_on()
        self.clock = self.running.ends
        return self._turns.ended
