"""A job and guests through a stream on a made engine, before an endpoint says that it is ready.

Compiled code is on disk from the first job on (`llmbatch.runtime.warmup`), and a process loads each function where it
first calls it. Of those that guests need an endpoint would load some tenths of a second for its first guest, and again
for the first one beside a job. So a stream is run once with both: guests alone, beside a job, and between two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.guests import Guest, GuestEnd, GuestInbox
from llmbatch.runtime.protocols import EngineObserver, Totals
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.scheduler.output import Step, StepResult

_ROWS: Final = 4
_ANSWER: Final = 3  # tokens
_MOST: Final = 4096  # tokens of a prompt
_LONG: Final = 0.2  # seconds, a step that is held
_PAGE: Final = 8  # tokens


def rehearse_guests(cost: CostModel, latency: Latency) -> Totals:
    """Run a few guests without and beside a job by that cost, in steps that may take so long; what was done."""
    inbox = GuestInbox()
    prompt = int(min(_MOST, _LONG / cost.rates.seconds_per_token + 1))
    guests = iter([_guest(9), _guest(prompt), _guest(9)])

    def arrive() -> None:
        guest = next(guests, None)
        if guest is not None:
            inbox.put(guest)

    engine = _HeldEngine(cost, arrive)
    pages = (_ROWS + 4) * (prompt // _PAGE + 2)
    arrive()
    stream = Stream.open(
        engine, Pool(pages, _PAGE), cost, Scheduling(max_running=8), _Closing(inbox), inbox=inbox, latency=latency
    )
    return stream.run(_OneWindow(_window(prompt)))


def _guest(tokens: int) -> Guest:
    prompt, params = np.arange(tokens, dtype=np.int32), SamplingParams(max_tokens=_ANSWER)
    return Guest(prompt, _ANSWER, params, 0, 1e9, _Unheard())


class _HeldEngine(RecordedEngine):
    """Provides itself, an engine that generates recorded lengths, with two layers between which guests arrive."""

    def __init__(self, cost: CostModel, arrive: Callable[[], None]) -> None:
        super().__init__(cost)
        self._arrive = arrive

    def execute_in_parts(self, step: Step, between: Callable[[], None]) -> StepResult:
        self._arrive()
        between()
        return self.execute(step)

    def engine(self) -> _HeldEngine:
        return self

    new_engine = engine


@dataclass(frozen=True, slots=True, eq=False)
class _RehearsedWindow:
    requests: RequestBatch
    tree: PrefixTree
    answered: NDArray[np.int32]


class _OneWindow:
    """Gives a window once."""

    def __init__(self, window: _RehearsedWindow) -> None:
        self._windows = [window]

    def next(self, wait: bool) -> _RehearsedWindow | None:
        return self._windows.pop() if self._windows else None


class _Closing(EngineObserver[Any]):
    """Lets the stream end once nothing runs."""

    def __init__(self, inbox: GuestInbox) -> None:
        self._inbox = inbox

    def idle(self) -> None:
        self._inbox.close()


class _Unheard:
    """Listens to nothing."""

    def sampled(self, tokens: NDArray[np.int32]) -> None:
        pass

    def ended(self, end: GuestEnd) -> None:
        pass


def _window(prompt: int) -> _RehearsedWindow:
    """Make a window of rows with prompts of so many tokens, which have half of it in common."""
    tokens = np.tile(np.arange(prompt, dtype=np.int32), (_ROWS, 1))
    tokens[:, prompt // 2 :] += np.arange(_ROWS, dtype=np.int32)[:, None]
    offsets = np.arange(_ROWS + 1, dtype=np.int64) * prompt
    answers, zeros = np.full(_ROWS, _ANSWER, np.int32), np.zeros(_ROWS, np.int32)
    serial = np.arange(_ROWS, dtype=np.uint64)
    params = (SamplingParams(max_tokens=_ANSWER),)
    requests = RequestBatch(tokens.ravel(), offsets, answers, zeros, params, serial, answers.copy())
    return _RehearsedWindow(requests, PrefixTree.build(requests.tokens, offsets), zeros.copy())
