"""Replicas by the clock that end together: one without work takes rows of the one that would end last, or joins it.

What a decision goes by is in `llmbatch.planning.even_ends`. It is made between two lots of steps
(`llmbatch.simulation.engines_in_turn`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.even_ends import JOIN_SECONDS, RowsLeft, pays, rows_to_move, seconds_joined, seconds_of_all
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Examples, Pool, Scheduling, Workload
from llmbatch.runtime.shard_run import ShardRun
from llmbatch.scheduler.output import FinishReason
from llmbatch.simulation.engines_in_turn import EngineRun, PausedLoop, TurnEngine

_AGAIN: Final = 0.01  # of the time so far, after which it is decided again who runs what


class EvenReplicas:
    """Replicas that run the shards of a workload and end together.

    `output`, int32 by row, are the answers' tokens; `cost` and `pool` are of one device. `parts` are what was run.
    """

    def __init__(
        self, workload: Workload, output: NDArray[np.int32], cost: CostModel, pool: Pool, scheduling: Scheduling
    ) -> None:
        self.parts: list[EngineRun] = []
        self._workload = workload
        self._output = np.minimum(output, workload.max_tokens)
        self._cost = cost
        self._pool = pool
        self._scheduling = scheduling
        self._answered = np.zeros(len(output), np.int32)
        self._idle: list[TurnEngine] = []
        self._running: list[TurnEngine] = []
        self._left: dict[tuple[TurnEngine, int], RowsLeft | None] = {}  # of a decision, by engine and devices

    def run(self, shards: list[NDArray[np.int32]]) -> None:
        """Run rows to their end, those of a shard on an engine each to begin with."""
        for number, rows in enumerate(shards):
            self._begin(TurnEngine((number,)), rows, np.zeros_like(self._output))
        decided = 0.0
        while self._running:
            engine = min(self._running, key=lambda one: one.clock)
            now, ended = engine.clock, self._go_on(engine)
            if ended:
                self._idle += [TurnEngine((device,), engine.clock) for device in engine.devices]
            if ended or now > decided * (1.0 + _AGAIN):
                decided = now
                while self._running and self._decide(now):
                    pass

    def _go_on(self, engine: TurnEngine) -> bool:
        """Let an engine take a lot of steps; whether it has ended what it had."""
        ended = engine.go_on()
        done = engine.running.loop.ended_since(0).requests
        self._answered[done] = self._output[done]
        if ended:
            self.parts.append(engine.running)
            self._running.remove(engine)
        return ended

    def _decide(self, now: float) -> bool:
        """Let engines join, or one without work take rows of the one that would end last; whether anything changed.

        Engines that moves make even end at the mean at best: where they end sooner joined, they join. That is asked
        where one is without work, or no row waits on any.
        """
        self._left.clear()
        late = self._by_end()
        if len(late) < len(self._running) or not (self._idle or self._is_tail()):
            return False
        even = (sum(end for end, _ in late) + len(self._idle) * now) / (len(late) + len(self._idle))
        if self._join(late, now, even):
            return True
        return len(self._idle) > 0 and (self._take(late[0][1]) or self._join(late, now, late[0][0]))

    def _is_tail(self) -> bool:
        """Say whether no row waits on any engine."""
        lefts = [self._left_of(engine, len(engine.devices)) for engine in self._running]
        return all(left is not None and left.waiting == 0 for left in lefts)

    def _by_end(self) -> list[tuple[float, TurnEngine]]:
        """Predict when engines end, the latest first; without those that do not know yet what they have left."""
        ends = []
        for engine in self._running:
            cost, pool = self._of(len(engine.devices))
            left = self._left_of(engine, len(engine.devices))
            if left is not None and len(left.rows):
                ends.append((engine.clock + seconds_of_all(left, cost, pool.whole_tokens), engine))
        return sorted(ends, key=lambda one: -one[0])

    def _take(self, donor: TurnEngine) -> bool:
        """Let an engine without work take rows of another one, if it is its like; whether it did."""
        left = self._left_of(donor, 1)
        if left is None or len(donor.devices) > 1:
            return False
        rows = rows_to_move(left, self._cost, self._pool.whole_tokens)
        if len(rows):
            helper = self._idle.pop(0)
            helper.clock = max(helper.clock, donor.clock)
            generated = np.zeros_like(self._output)
            _give(donor, rows, generated)
            self._begin(helper, rows, generated)
        return len(rows) > 0

    def _join(self, late: list[tuple[float, TurnEngine]], now: float, end: float) -> bool:
        """Let engines without work join those that would end last, if all end sooner than at `end`; whether they do."""
        if self._cost.hardware.link is None:
            return False
        soonest, donors = np.inf, late[:0]
        devices: tuple[int, ...] = ()
        for count in range(1, len(late) + 1):
            together = self._devices_with(late[:count])
            if together:
                cost, pool = self._of(len(together))
                lefts = [self._left_of(engine, len(together)) for _, engine in late[:count]]
                known = [left for left in lefts if left is not None]
                seconds = seconds_joined(known, cost, pool.whole_tokens)
                ends = max([now + seconds, *(other for other, _ in late[count:])])
                if ends < soonest:
                    soonest, donors, devices = ends, late[:count], together
        if not devices or not pays(end - now, soonest - now):
            return False
        joining = [engine for engine in self._idle if engine.devices[0] in devices]
        begins = max(engine.clock for engine in (*joining, *(donor for _, donor in donors))) + JOIN_SECONDS
        generated, rows = np.zeros_like(self._output), []
        for _, donor in donors:
            left = self._left_of(donor, len(devices))
            assert left is not None, "it was counted above"
            rows.append(left.rows)
            _give(donor, left.rows, generated)
            while not self._go_on(donor):
                pass
        self._idle = [engine for engine in self._idle if engine not in joining]
        self._begin(TurnEngine(devices, begins), np.concatenate(rows), generated)
        return True

    def _devices_with(self, donors: list[tuple[float, TurnEngine]]) -> tuple[int, ...]:
        """Return the devices of some engines and of others without work, a power of two; none where nothing joins."""
        devices = [device for _, engine in donors for device in engine.devices]
        idle = [engine.devices[0] for engine in self._idle]
        count = (1 << (len(devices) + len(idle)).bit_length()) // 2
        more = count - len(devices)
        return (*devices, *idle[:more]) if more >= 0 and len(donors) + more > 1 else ()

    def _left_of(self, engine: TurnEngine, devices: int) -> RowsLeft | None:
        """Count what an engine has left, at the cost of so many devices; once a decision."""
        key = engine, devices
        if key not in self._left:
            self._left[key] = engine.left(self._of(devices)[0])
        return self._left[key]

    def _of(self, devices: int) -> tuple[CostModel, Pool]:
        """Return cost and pool of so many devices that run as one."""
        return on_joined(self._cost, devices), self._pool.times(devices)

    def _begin(self, engine: TurnEngine, rows: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        workload = self._rest_of(rows, generated)
        cost, pool = self._of(len(engine.devices))
        devices, begins = engine.devices, engine.clock

        def part_of(pause: Callable[[], None]) -> EngineRun:
            loop = PausedLoop(np.maximum(self._output - generated, 1), cost, pause)
            run = ShardRun(workload, loop, pool, cost, self._scheduling)
            return EngineRun(devices, begins, generated, loop, run)

        self._running.append(engine)
        engine.begin(part_of)

    def _rest_of(self, rows: NDArray[np.int32], generated: NDArray[np.int32]) -> Workload:
        """Return the workload of some rows, of whose answers so many tokens are there; what is known of lengths too."""
        whole = self._workload
        keep = np.zeros(len(whole), np.bool_)
        keep[rows] = True
        begun = np.where(keep, generated, 0).astype(np.int32)
        tree = whole.tree.select(keep)
        if begun.any():
            tree = _with_answers(tree, begun)
        answered = np.where(keep, 0, self._answered)
        examples = Examples(whole.tree.select(keep | (answered > 0)), answered) if answered.any() else None
        return replace(
            whole,
            tree=tree,
            max_tokens=np.maximum(whole.max_tokens - begun, 1),
            known=np.where(whole.known > 0, np.maximum(whole.known - begun, 1), 0).astype(np.int32),
            begun=begun,
            examples=examples,
        )


def _with_answers(tree: PrefixTree, begun: NDArray[np.int32]) -> PrefixTree:
    """Return a tree whose rows are longer by so many tokens of their own, int32 by row.

    Rows that are equal, or begin as another one does that ends, share a token less: they may part there.
    """
    lengths = tree.lengths + begun
    before = np.concatenate((tree.rows[:1], tree.rows[:-1]))
    own = (begun[tree.rows] > 0) | (begun[before] > 0)
    ends = np.minimum(tree.lengths[tree.rows], tree.lengths[before])
    lcp = np.where(own & (tree.lcp > 0) & (tree.lcp == ends), tree.lcp - 1, tree.lcp).astype(np.int32)
    return PrefixTree.of_sorted(tree.rows, lcp, lengths)


def _give(donor: TurnEngine, rows: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
    """Let a donor let go of rows, and note the tokens that there are of each."""
    part = donor.running
    generated[rows] = part.generated[rows]
    begun, tokens = part.run.scheduler.unfinished()
    kept = np.isin(begun, rows)
    generated[begun[kept]] += tokens[kept]
    part.loop.withdraw(part.run.scheduler, rows, FinishReason.CANCELLED)
    part.run.give(rows)
