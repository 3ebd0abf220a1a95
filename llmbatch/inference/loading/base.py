"""What a job knows of a model's engines before its weights are loaded, and how it gets them, one at a time, after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.model.outline import Described
from llmbatch.inference.progress import Progress
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling, Workload, split_for
from llmbatch.runtime.protocols import W, WindowSource


class Engines(ABC):
    """What is known of a model and of the engines that it will have, before its weights are loaded and after."""

    def __init__(self, model: Described, pool: Pool, max_running: int, notes: tuple[str, ...] = ()) -> None:
        self.model = model
        self.pool = pool  # before the weights are loaded: as far as it is known then
        self.max_running = max_running  # sequences in flight, where the user does not say how many
        self.notes = notes  # what the user should be told, a sentence each

    @property
    @abstractmethod
    def cost(self) -> CostModel:
        """What requests cost on this machine, measured once."""

    @abstractmethod
    def load(self, scheduling: Scheduling, progress: Progress) -> LoadedEngines:
        """Make this thread ready, and load the weights if they are not. Raises JobError where memory runs out."""


@dataclass(frozen=True, slots=True)
class _InUse:
    """An engine, which has the memory of the pool."""

    engine: StreamEngine


class _MemoryFree:
    """No engine: one that is asked for must be made first."""


class _FirstTaken(Generic[W]):
    """A source whose first window was taken to look at it."""

    def __init__(self, first: W, others: WindowSource[W]) -> None:
        self._first: W | None = first
        self._others = others

    def next(self, wait: bool) -> W | None:
        """Return the next window."""
        first, self._first = self._first, None
        return self._others.next(wait) if first is None else first


class LoadedEngines(Engines):
    """Makes the engines of a model, one at a time (`llmbatch.runtime.protocols.EngineProvider`)."""

    def __init__(self, model: Described, pool: Pool, max_running: int, notes: tuple[str, ...] = ()) -> None:
        super().__init__(model, pool, max_running, notes)
        self._state: _MemoryFree | _InUse = _MemoryFree()

    def split_by(self, windows: WindowSource[W]) -> WindowSource[W]:
        """Split the memory of the pool by the rows of the first window, if no engine has it yet; return the windows."""
        if isinstance(self._state, _InUse) or not self.pool.windows.tokens:
            return windows
        first = windows.next(True)
        if first is None:
            return windows
        self.pool = split_for(self.pool, Workload.of(first.requests, first.answered, tree=first.tree))
        return _FirstTaken(first, windows)

    def engine(self) -> StreamEngine:
        """Return the engine, with the memory of the pool. Raises JobError where memory runs out."""
        return self._state.engine if isinstance(self._state, _InUse) else self.new_engine()

    def new_engine(self) -> StreamEngine:
        """Make another engine in the place of the one before."""
        self._state = _MemoryFree()  # the new one needs the memory of the one before
        self._state = made = _InUse(self._make())
        return made.engine

    def learn(self, cost: CostModel) -> None:
        """Take note of what requests cost by the steps of a job."""

    @abstractmethod
    def _make(self) -> StreamEngine: ...
