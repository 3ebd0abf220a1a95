"""Rows that kill engines: which row of a step it was, and whether it was a row at all.

What an engine held is lost when it dies, and a step tells only which rows were in it, up to hundreds. One of them may
be the cause, and would kill the next engine too. So the n rows of the last step are run again in about sqrt(n) groups.
If a group kills the engine, its rows are run one by one. A row that kills the engine on its own gets an error, and the
others go on. If three rows do so and none is answered in between, the cause may be the engine. So it is given a row
that was answered before or, if there is none, up to three other rows, one by one. If it dies of these too, the job
fails.
"""

from __future__ import annotations

import math
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import JobError, RowError
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import Workload
from llmbatch.runtime.current_run import CurrentRun
from llmbatch.runtime.loops.pipelined_loop import drive
from llmbatch.runtime.loops.step_loop import EngineDied, TokenDropper
from llmbatch.runtime.protocols import W
from llmbatch.runtime.shard_run import ShardRun

_MOST_ALONE: Final = 3  # rows in a row that may kill the engine alone before it is tried with others


class DeadlyRows(Generic[W]):
    """Finds the rows that kill the engine of a stream. See the module's text."""

    def __init__(self, current: CurrentRun[W]) -> None:
        self._current = current
        self._alone = 0  # rows in a row that killed the engine alone
        self._ended_before = 0  # requests that had ended when the last of them did
        self._rng = np.random.default_rng(0)

    def run_apart(self, died: EngineDied) -> None:
        """Run the rows of the step that killed the engine apart from the others, on another one.

        Raises `JobError` where engines die whatever they are given.
        """
        self._current.replace_engine(died)
        requests = self._current.now.requests
        suspects = died.requests[~requests.are_guests(died.requests)]
        if len(suspects):
            for group in np.array_split(suspects, math.isqrt(len(suspects))):
                self._try(group)

    def _try(self, group: NDArray[np.int32]) -> None:
        """Run some requests to their end; alone, each, where they kill the engine."""
        requests = self._current.now.requests
        death = self._death_of(group)
        still_open = group[requests.open[group]]
        if death is not None and len(still_open) == 1:
            self._give_up(int(still_open[0]), death)
        elif death is not None:
            for request in still_open:
                if requests.open[request]:
                    self._try(request[None])

    def _death_of(self, group: NDArray[np.int32]) -> EngineDied | None:
        """Run some requests to their end with nothing beside them; how the engine died of them, if it did."""
        requests = self._current.now.requests
        others = np.setdiff1d(np.flatnonzero(requests.open), group)
        workload = requests.workload().without(others.tolist())
        try:
            self._current.begin(
                requests, PreparedShard.of(workload, self._current.context.pool.page_size), alone=True
            ).run_to_end()
        except EngineDied as died:
            self._current.replace_engine(died)
            return died
        return None

    def _give_up(self, request: int, died: EngineDied) -> None:
        """Fail a row that killed the engine alone. Raises `JobError` where the engine dies of others too."""
        requests = self._current.now.requests
        cause = died.__cause__
        what = f"{type(cause).__name__}: {' '.join(str(cause).split()) or 'no message'}"
        self._alone = 1 if self._current.context.totals.ended > self._ended_before else self._alone + 1
        self._ended_before = self._current.context.totals.ended
        if self._alone >= _MOST_ALONE:
            if not self._works(request):
                raise JobError(
                    f"the engine dies whatever it is given, of {self._alone} rows in a row that ran alone, "
                    f"and of others: {what}: try another device or dtype (--device, --dtype)"
                )
            self._alone = 0
        attempts = int(requests.attempts[request])
        requests.open[request] = False
        message = f"the engine died of this row alone, after {attempts} attempts: {what}"
        window = requests.windows[requests.window[request]]
        self._current.context.observer.failed(
            window, {int(requests.index[request]): RowError("engine", message)}, attempts
        )

    def _works(self, killer: int) -> bool:
        """Tell whether the engine answers a row again that was answered before; where none was, one of some others."""
        requests, context = self._current.now.requests, self._current.context
        answered = np.flatnonzero(requests.answered)
        if len(answered) == 0:
            others = self._rng.permutation(np.setdiff1d(np.flatnonzero(requests.open), killer)).astype(np.int32)
            return any(self._death_of(other[None]) is None for other in others[:_MOST_ALONE])
        cheapest = answered[np.argmin(requests.requests.prompt_lengths[answered] + requests.answered[answered])]
        request = requests.requests.take(cheapest[None])
        engine = self._current.now.engine
        engine.begin(request)
        loop = drive(engine, TokenDropper(engine))
        run = ShardRun(Workload.of(request), loop, context.pool, context.refit.cost, context.scheduling)
        try:
            run.run()
        except EngineDied:
            return False
        return True
