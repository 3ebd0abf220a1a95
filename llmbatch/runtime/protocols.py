"""What a stream takes windows from and runs them on, and who sees what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import StreamEngine, TokenLogprobs
from llmbatch.errors import RowError
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences

NO_REQUESTS = np.empty(0, np.int32)


def no_answer(params: SamplingParams) -> RowError:
    """Make the error of a request of which the engine made no answer, by what it asked for."""
    if params.structured_outputs is None:
        return RowError("engine", "the model's logits were not finite: try dtype float32")
    if params.min_tokens:
        return RowError(
            "engine",
            "the model's logits were not finite, or the form of the answer became too large to be followed, or it "
            f"needs a token that may not come before min_tokens, {params.min_tokens}: try dtype float32, a simpler "
            "form, or no min_tokens",
        )
    return RowError(
        "engine",
        "the model's logits were not finite, or the form of the answer became too large to be followed: "
        "try dtype float32, or a simpler form",
    )


class RequestWindow(Protocol):
    """Requests of one window."""

    @property
    def requests(self) -> RequestBatch:
        """What is asked."""
        ...

    @property
    def tree(self) -> PrefixTree:
        """The prefix tree of their prompts."""
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
        """Return the next window. None: none is ready, or, if the source was to `wait` for one, there are no more."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedRequests(Generic[W]):
    """Requests of a window that ended, one entry each."""

    window: W
    requests: NDArray[np.int32]
    tokens: list[NDArray[np.int32]]  # generated
    finish: NDArray[np.uint8]  # a `FinishReason`
    cached: NDArray[np.int32]  # prompt tokens that were not computed
    attempts: NDArray[np.int32]  # how often it was given to an engine
    logprobs: list[tuple[TokenLogprobs | None, TokenLogprobs | None]]  # of answer and prompt, where they are told


@dataclass(frozen=True, slots=True)
class BegunRequests(Generic[W]):
    """Requests of a window whose answers have begun, one entry each."""

    window: W
    requests: NDArray[np.int32]
    tokens: list[NDArray[np.int32]]  # of their answers so far, at least one; those that are lent may have none


class GivenUp(IntEnum):
    """Which requests are not to be run any more."""

    NONE = 0
    NOT_BEGUN = 1  # those that the engine was not given
    ALL = 2


class Lending(Generic[W]):
    """Says whether a part of what is left is to go on elsewhere. Nothing is, unless overridden."""

    @property
    def asks_seconds(self) -> bool:
        """Whether to be told how long the rest will take. Asked after each step."""
        return False

    def seconds_left(self, seconds: float) -> None:
        """See in how many seconds, as predicted, all that runs and waits will have ended."""

    @property
    def lends(self) -> bool:
        """Whether a part of what is left is to go on elsewhere. Asked before each step of who has no guests."""
        return False

    def may_lend(self, window: W) -> bool:
        """Say whether what a window has may go on elsewhere."""
        return False


class EngineObserver(Lending[W]):
    """Sees what an engine is given and what it answers: steps, and, where a stream runs it, the requests of windows.

    A `StepLoop` tells of steps, by the numbers that its scheduler has for requests. A `Stream` tells of these too, and
    of requests by their numbers in their window, always between two steps. Methods do nothing unless overridden.
    """

    def before_step(self, step: Step) -> None:
        """See a step that the engine is about to execute."""

    def step_took(self, step: Step, seconds: float) -> None:
        """See what the engine measured of a step; not called for steps that it does not measure."""

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """See what ended in a step, or was withdrawn after it. May raise `Stop`.

        A `StepLoop` withdraws the requests that are returned with `FinishReason.TIMEOUT`; what is returned for
        withdrawn ones, or to a `Stream`, is ignored.
        """
        return NO_REQUESTS

    def idle(self) -> None:
        """See that nothing runs and nothing waits, of a stream that goes on."""

    @property
    def interrupts(self) -> bool:
        """Whether a window is to join at once, or requests are given up or lent. Asked before each step."""
        return False

    def given_up(self, window: W) -> GivenUp:
        """Say which requests of a window are not to be run any more."""
        return GivenUp.NONE

    def dropped(self, window: W, requests: NDArray[np.int32]) -> None:
        """See requests that were given up: nothing more is told of them."""

    def joined(self, window: W) -> None:
        """See a window whose requests are about to be run."""

    def begun(self, window: W, requests: NDArray[np.int32]) -> None:
        """See requests that are given to the engine in the next step."""

    def ended(self, ended: CompletedRequests[W]) -> None:
        """Take the answers of requests."""

    @property
    def keeps_begun(self) -> bool:
        """Whether to be told of answers that have begun. Asked after each step."""
        return False

    def begun_so_far(self, begun: list[BegunRequests[W]]) -> None:
        """Take all answers that have begun and not ended."""

    def lent(self, requests: list[BegunRequests[W]]) -> None:
        """Take requests that go on elsewhere, begun or not: nothing more is told of them. None, if no move pays."""

    def failed(self, window: W, errors: dict[int, RowError], attempts: int) -> None:
        """See requests that will have no answer, and why, after so many attempts each."""

    def cut(self, window: W, requests: NDArray[np.int32]) -> None:
        """See requests whose answers the pool may end before their max_tokens."""


class Stop(Exception):
    """Raised by an observer to end a stream; sequences that run have until `deadline` (`time.monotonic`) to end."""

    def __init__(self, deadline: float) -> None:
        super().__init__("the stream was asked to stop")
        self.deadline = deadline


@dataclass(slots=True)
class Totals:
    """What a stream did."""

    steps: int = 0
    preemptions: int = 0
    engine_deaths: int = 0
    ended: int = 0  # requests that the engine answered, or that were withdrawn from it
    rows_cut: int = 0  # that the pool may end early
    reason: str = ""  # of the first plan: why this order


class EngineProvider(Protocol):
    """Makes engines."""

    def engine(self) -> StreamEngine:
        """Return an engine that nobody uses."""
        ...

    def new_engine(self) -> StreamEngine:
        """Make another engine in the place of one that died."""
        ...
