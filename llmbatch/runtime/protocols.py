"""What a stream takes windows from, runs them on, and gives their answers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine
from llmbatch.errors import RowError
from llmbatch.preprocess.request_batch import RequestBatch


class RequestWindow(Protocol):
    """Requests of one window."""

    @property
    def requests(self) -> RequestBatch:
        """What is asked."""
        ...

    @property
    def answered(self) -> NDArray[np.int32]:
        """Tokens of the answers that are there already, int32 [n]; 0 for requests that are to be run."""
        ...


W = TypeVar("W", bound=RequestWindow)
W_co = TypeVar("W_co", bound=RequestWindow, covariant=True)


class WindowSource(Protocol[W_co]):
    """Where windows come from."""

    def next(self, wait: bool) -> W_co | None:
        """The next window. None: none is ready, or, of a feed that was to `wait` for one, there are no more."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedRequests(Generic[W]):
    """Requests of a window that ended, one entry each."""

    window: W
    requests: NDArray[np.int32]
    tokens: list[NDArray[np.int32]]  # generated
    finish: NDArray[np.uint8]  # a `Finish`
    cached: NDArray[np.int32]  # prompt tokens that were not computed
    attempts: NDArray[np.int32]  # how often it was given to an engine


class RequestObserver(Protocol[W]):
    """Where answers go. Called between two steps."""

    def joined(self, window: W) -> None:
        """A window's requests are about to be run."""
        ...

    def begun(self, window: W, requests: NDArray[np.int32]) -> None:
        """Requests are given to the engine in the next step."""
        ...

    def ended(self, ended: CompletedRequests[W]) -> None:
        """Requests have their answers."""
        ...

    def failed(self, window: W, errors: dict[int, RowError], attempts: int) -> None:
        """Requests will have none."""
        ...

    def cut(self, window: W, requests: NDArray[np.int32]) -> None:
        """The pool may end the answers of these requests before their max_tokens."""
        ...

    def tick(self) -> None:
        """A step was taken. May raise `Stop`."""
        ...


class Stop(Exception):
    """Raised by a taker to end a stream; sequences that run have until `deadline` (`time.monotonic`) to end."""

    def __init__(self, deadline: float) -> None:
        super().__init__("the stream was asked to stop")
        self.deadline = deadline


class EngineProvider(Protocol):
    """Makes engines."""

    def engine(self) -> StreamEngine:
        """An engine that nobody uses."""
        ...

    def new_engine(self) -> StreamEngine:
        """Another one, in the place of one that died."""
        ...
