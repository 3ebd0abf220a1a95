"""What stays the same in a stream while windows and engines come and go."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Generic

from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.runtime.online.live_guests import LiveGuests
from llmbatch.runtime.protocols import EngineObserver, Totals, W
from llmbatch.runtime.refit import Refit
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.system.at_once import AtOnce


@dataclass(frozen=True, slots=True)
class StreamContext(Generic[W]):
    """The memory, the rules and the observer of a stream, what steps cost, and who plans."""

    pool: Pool
    scheduling: Scheduling
    refit: Refit
    observer: EngineObserver[W]
    row_timeout: float  # seconds
    totals: Totals
    guests: LiveGuests | None = None  # where guests may arrive
    latency: Latency | None = None  # how long steps may take
    planner: Executor = field(default_factory=AtOnce)  # makes plans, and prepares windows that join
