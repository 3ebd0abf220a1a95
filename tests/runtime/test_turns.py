"""Conversations whose next turns come in a later window: the engine reads what it has answered, not computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.runtime.protocols import CompletedRequests
from llmbatch.runtime.stream import Stream
from tests.runtime.test_pool_limits import Answers, Hosting, accelerated_engine, torch_engine, window_of
from tests.runtime.test_stream import Listed, Window
from tests.support.golden import generate
from tests.support.models import EOS, PAD, tiny_model
from tests.support.workloads import COST

MOST = 8


class Found(Answers):
    """Keeps how many tokens were found too."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[tuple[int, int], int] = {}

    def ended(self, ended: CompletedRequests[Window]) -> None:
        super().ended(ended)
        for request, cached in zip(ended.requests.tolist(), ended.cached.tolist(), strict=True):
            self.cached[id(ended.window), request] = cached


class Turns:
    """A feed whose second window is made of the first one's answers, when all of them are there."""

    def __init__(self, first: list[list[int]], taken: Found) -> None:
        self._first, self._taken = first, taken
        self.windows = [window_of(first, [MOST] * len(first))]
        self.second: list[list[int]] = []

    def next(self, wait: bool) -> Window | None:
        if not self._taken.events:
            return self.windows[0]
        if len(self.windows) > 1 or not wait:
            return None
        answers = [self._taken.tokens[id(self.windows[0]), i] for i in range(len(self._first))]
        self.second = [
            [*prompt, *answer, 7, 8 + i] for i, (prompt, answer) in enumerate(zip(self._first, answers, strict=True))
        ]
        self.windows.append(window_of(self.second, [MOST] * len(self.second)))
        return self.windows[1]


@pytest.mark.parametrize("make", [torch_engine, accelerated_engine])
def test_next_turns_are_answered_as_by_generate_and_find_what_was_answered(
    make: Callable[[str, int], StreamEngine], shallow: str
) -> None:
    rng = np.random.default_rng(11)
    first = [rng.integers(0, 256, n).tolist() for n in (6, 3, 9)]
    taken = Found()
    feed = Turns(first, taken)
    Stream.open(Hosting(make(shallow, 40)), Pool(40, 4), COST, Scheduling(max_running=8), taken).run(feed)
    expected = generate(tiny_model("llama", layers=1), feed.second, [MOST] * 3, [EOS], PAD)
    second = id(feed.windows[1])
    assert [taken.tokens[second, i] for i in range(3)] == expected
    # All of prompt and answer, but of the last token, upon which nothing was computed.
    assert [taken.cached[second, i] for i in range(3)] == [len(row) - 3 for row in feed.second]


def test_a_window_finds_the_prefix_of_one_that_has_ended() -> None:
    prefix = list(range(50, 90))
    windows = [window_of([[*prefix, number, i] for i in range(3)], [5] * 3) for number in (1, 2)]
    windows.insert(1, window_of([[9, 9, 9]], [2]))
    taken = Found()
    Stream.open(Hosting(RecordedEngine(COST)), Pool(100, 4), COST, Scheduling(max_running=8), taken).run(
        Listed(windows)
    )
    assert sorted(taken.cached[id(windows[2]), i] for i in range(3)) == [40, 40, 40]
    assert sorted(taken.cached[id(windows[0]), i] for i in range(3)) == [0, 40, 40]
