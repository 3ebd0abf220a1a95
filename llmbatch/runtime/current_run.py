"""The engine of a stream and what it runs; another engine takes the place of one that died."""

from __future__ import annotations

import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic

from llmbatch.engine.base import StreamEngine
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.runtime.active_run import ActiveRun
from llmbatch.runtime.context import StreamContext
from llmbatch.runtime.live_requests import Following, LiveRequests
from llmbatch.runtime.loops.step_loop import EngineDied
from llmbatch.runtime.protocols import EngineProvider, W


@dataclass(frozen=True, slots=True)
class Idle(Generic[W]):
    """An engine with nothing in its slots, and the requests that were run before: examples for the next ones."""

    engine: StreamEngine
    requests: LiveRequests[W]


class CurrentRun(Generic[W]):
    """What a stream runs now, and what is made to take its place."""

    def __init__(self, engines: EngineProvider, engine: StreamEngine, context: StreamContext[W]) -> None:
        self.context: StreamContext[W] = context
        self.now: Idle[W] | ActiveRun[W] = Idle(engine, LiveRequests.none())
        self.next: Future[Following[W]] | None = None  # while requests are given other numbers
        self._engines = engines

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return isinstance(self.now, Idle) or self.now.done

    def begin(
        self, requests: LiveRequests[W], prepared: PreparedShard | None = None, *, alone: bool = False
    ) -> ActiveRun[W]:
        """Start on requests with nothing in slots; where they are to run `alone`, guests wait."""
        engine = self.now.engine
        if isinstance(self.now, ActiveRun):
            self.now.release()
        prepared = prepared or PreparedShard.of(requests.workload(), self.context.pool.page_size)
        self.now = active = ActiveRun.begin(self.context, engine, requests, prepared, alone=alone)
        active.next = self.next
        return active

    def replace_engine(self, died: EngineDied) -> None:
        """Put another engine in the place of one that died, whose memory it needs."""
        now = self.now
        assert isinstance(now, ActiveRun), "an engine dies of a step"
        self.context.totals.engine_deaths += 1
        requests = now.requests
        if self.context.guests is not None:  # they run again, in other rows
            self.context.guests.engine_died(died.requests)
            requests.open[requests.expected > 0] = False
        requests.begun[requests.open] = False
        requests.spent[requests.open] = 0.0
        now.count()
        now.release()
        for error in (died, died.__cause__):  # their tracebacks hold the engine
            if error is not None:
                traceback.clear_frames(error.__traceback__)
        self.now = Idle(self._engines.new_engine(), requests)
