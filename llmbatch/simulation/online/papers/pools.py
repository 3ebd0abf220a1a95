"""`ooco` in two pools: one relaxed engine that prefills, one strict engine that decodes (OOCO 3.2 to 3.4).

The relaxed engine takes steps of any length: online prompts, first come first served and alone, as soon as there are
any; else a new prompt of the job, if the gate lets it in; else all rows of the job that decode there. The strict engine
only decodes, in steps of at most the TPOT target: online requests and the job's rows that Algorithm 2 picks. An online
request moves to it with its first token (push); where it had room for all and for more, it asks for a row of the job of
a certain length (Algorithm 1), and gets the one that decodes on the relaxed engine and comes nearest (pull).

How gaps were read:

- *Interruption* (3.4.1): a relaxed step of the job alone ends at the next layer when an online request arrives, and
  what it computed is lost. A checkpoint of it is future work in the paper.
- *Transfers* take no time, and a row is there when the step has ended in which it was: the paper sends pages by RDMA.
- *Algorithm 1*: lengths are those of the rows that decode on the relaxed engine and whose pages are free on the strict
  one. In lines 5 and 8 the longest of them with L(B + r) <= S is preferred. Line 7 asks whether a *group* of rows can
  saturate compute: whether so many of the shortest rows as are wanting fit S. The saturated batch is the number of
  tokens at which the GEMMs take twice as long as for one. One row moves after each strict step.
- *Evicted rows* are computed again on the relaxed engine, before all that wait there.
- An online request that finds no page on the strict engine, where no row of the job is left, waits until there is one.

The two engines are two `RunState`s over the same rows. The one whose clock is behind takes the next step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.records import Records, records
from llmbatch.errors import ParameterError
from llmbatch.simulation.online.papers import ooco
from llmbatch.simulation.online.papers.clock import empty_log, execute
from llmbatch.simulation.online.papers.lanes import arrive, next_arrival
from llmbatch.simulation.online.papers.ooco import MixedBatch
from llmbatch.simulation.online.papers.pool_steps import decode, drop, leave, next_online, preferred, receive, relax
from llmbatch.simulation.online.papers.roofline import Roofline
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState, RunTotals, StepLoad


@dataclass
class Pools:
    """The two engines. `relaxed` is a state in which nothing has happened; both have the pages of its rules."""

    relaxed: RunState
    roofline: Roofline
    layers: int
    strict: RunState = field(init=False)
    batch: Records[MixedBatch] = field(init=False)
    coming: list[tuple[float, int]] = field(default_factory=list)  # to the strict engine: when, and which row

    def __post_init__(self) -> None:
        n = len(self.relaxed.rows)
        totals = records(RunTotals)
        totals[0].free, totals[0].draws = self.relaxed.rules.num_pages, 1
        totals[0].next_online = totals[0].next_offline = n  # nobody arrives here
        lanes = np.zeros((2, n), np.int32)
        self.strict = self.relaxed._replace(
            queue=lanes, head=np.full(2, n, np.int64), tail=np.full(2, n, np.int64), running=lanes.copy(),
            active=np.zeros(2, np.int64), chosen=np.zeros(n, np.int32), load=records(StepLoad), totals=totals,
        )  # fmt: skip  # arguments in groups
        self.batch = records(MixedBatch)

    def run(self, until: float) -> NDArray[np.void]:
        """Run to the end, or until `until` seconds have passed and every online request has ended: all steps."""
        logs = {False: empty_log(1024), True: empty_log(1024)}
        steps = {False: 0, True: 0}
        online = int(np.count_nonzero(self.relaxed.rows["online"]))
        relaxed, strict = self.relaxed.totals[0], self.strict.totals[0]
        while relaxed.ended_online + strict.ended_online < online or (
            relaxed.ended_offline + strict.ended_offline < len(self.relaxed.rows) - online
            and max(relaxed.now, strict.now) < until
        ):
            is_strict = bool(strict.now < relaxed.now)
            state = self.strict if is_strict else self.relaxed
            if not (self._decide_strict() if is_strict else self._decide_relaxed()):
                self._idle(is_strict)
                continue
            if steps[is_strict] == len(logs[is_strict]):
                logs[is_strict] = np.concatenate((logs[is_strict], empty_log(steps[is_strict]))).view(np.recarray)
            before = int(strict.ended_offline)
            execute(state, logs[is_strict], steps[is_strict])
            steps[is_strict] += 1
            self.relaxed.totals[0].offline -= int(strict.ended_offline) - before
            if not is_strict:
                self._push()
        log = np.concatenate([logs[is_strict][: steps[is_strict]] for is_strict in (False, True)]).view(np.recarray)
        in_order: NDArray[np.void] = log[np.argsort(log["begin_s"], kind="stable")]
        in_order["step"] = np.arange(len(log))
        return in_order

    def check(self) -> None:
        """Verify that pages add up; raises AssertionError."""
        travelling = [number for _, number in self.coming]
        held = int(self.relaxed.rows["pages"].sum()) - sum(int(self.relaxed.rows[n].pages) for n in travelling)
        free = int(self.relaxed.totals[0].free + self.strict.totals[0].free)
        assert free + held == 2 * self.relaxed.rules.num_pages, "a page is lost"

    def _idle(self, is_strict: bool) -> None:
        """Let the engine wait for what comes first: an arrival, a transfer, or the other engine's next step."""
        relaxed, strict = self.relaxed.totals[0], self.strict.totals[0]
        if is_strict:
            coming = [ready for ready, _ in self.coming if ready > strict.now]
            strict.now = min([*coming, relaxed.now if relaxed.now > strict.now else np.inf])
            return
        soonest = float(next_arrival(self.relaxed))
        other = strict.now if strict.now > relaxed.now else np.nextafter(relaxed.now, np.inf)
        busy = bool(self.strict.active.any()) or bool(self.coming)
        relaxed.now = max(relaxed.now, min(soonest, other) if busy else soonest)
        if not np.isfinite(relaxed.now):
            raise ParameterError("pools must have room for every request, but some wait for ever: give more memory")

    def _decide_relaxed(self) -> bool:
        """Decide the relaxed engine's step; False where there is none."""
        while True:
            arrive(self.relaxed)
            seconds = relax(self.relaxed, self.roofline, self.batch)
            load, totals = self.relaxed.load[0], self.relaxed.totals[0]
            coming = float(next_online(self.relaxed))
            if load.rows == 0 or load.online > 0 or coming >= totals.now + seconds:
                return bool(load.rows)
            layer = seconds / self.layers  # an online request interrupts the job at the end of this one
            drop(self.relaxed)
            totals.now += layer * np.ceil((coming - totals.now) / layer)

    def _decide_strict(self) -> bool:
        """Decide the strict engine's step; False where there is none."""
        strict = self.strict
        waiting = []
        while self.coming and self.coming[0][0] <= strict.totals[0].now:
            ready, number = heapq.heappop(self.coming)
            if not receive(strict, self.roofline, self.batch, number):
                waiting.append((ready, number))
        for each in waiting:
            heapq.heappush(self.coming, each)
        all_in = decode(strict, self.roofline, self.batch)
        self._return_evicted()
        if all_in:
            wanted = int(preferred(strict, self.relaxed, self.roofline, self.batch))
            if wanted >= 0:
                leave(self.relaxed, wanted)
                heapq.heappush(self.coming, (float(self.relaxed.totals[0].now), wanted))
        return bool(strict.load[0].rows)

    def _push(self) -> None:
        """Send the online requests that have their first token to the strict engine."""
        relaxed = self.relaxed
        for number in relaxed.running[ONLINE, : relaxed.active[ONLINE]].tolist():
            if ooco.decodes(relaxed, number):
                leave(relaxed, number)
                heapq.heappush(self.coming, (float(relaxed.totals[0].now), number))

    def _return_evicted(self) -> None:
        """Let rows that were evicted wait on the relaxed engine, before all others."""
        n = len(self.relaxed.rows)
        for lane in (JOB, ONLINE):
            for number in self.strict.queue[lane, self.strict.head[lane] : n][::-1]:
                self.relaxed.head[lane] -= 1
                self.relaxed.queue[lane, self.relaxed.head[lane]] = number
            self.strict.head[lane] = n
