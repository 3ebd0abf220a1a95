"""Windows that are planned while steps go on: what is told meanwhile, what is lost of it, and what is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.planning.prepared_shard import PreparedShard
from llmbatch.planning.workload import Pool
from llmbatch.runtime.live_requests import NextRequests
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.protocols import GivenUp, Stop
from llmbatch.runtime.stream import Stream
from tests.runtime.test_guests import BUDGET, POOL, opened, scheduler_of
from tests.runtime.test_pool_limits import window_of
from tests.runtime.test_stream import Engines, Listed, Window
from tests.support.examples import examples
from tests.support.guests import Crowd, Script, guest
from tests.support.workloads import COST


class Delayed(Future[Any]):
    """Work that is done when it was asked so many times whether it is."""

    def __init__(self, work: Callable[[], Any], looks: int) -> None:
        super().__init__()
        self._work, self.looks = work, looks

    def done(self) -> bool:
        """Do the work at the last look."""
        self.looks -= 1
        if self.looks == 0:
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
        return super().done()


class Delaying(Executor):
    """A planner whose work is done some steps after it was submitted: one more for each in turn, then as at first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.submitted: list[Delayed] = []
        self.ended = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take note of the work."""
        self.submitted.append(Delayed(partial(work, *args, **kwargs), 1 + len(self.submitted) % self._most))
        return self.submitted[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take note of the end."""
        self.ended = True


def beside(
    script: Script, inbox: GuestInbox, planner: Executor, *, host: Any = None, pool: Pool = POOL
) -> Stream[Window]:
    return Stream.open(host or Engines(), pool, COST, BUDGET, script, inbox=inbox, planner=planner)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for work that is not done looks again."""
    for module in ("stream", "active_run"):
        monkeypatch.setattr(f"llmbatch.runtime.{module}._LONGEST_WAIT", 0.0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
@examples(40)
def test_every_row_and_every_guest_ends_once_however_long_planning_takes(seed: int, most: int) -> None:
    rng, inbox, planner = np.random.default_rng(seed), GuestInbox(), Delaying(most)
    crowd = Crowd(rng, windows=4, most_own=2 + 20 * (most % 2))
    script = Script(inbox, crowd.acts(inbox, int))
    stream = beside(script, inbox, planner, pool=Pool(int(rng.integers(30, 120)), 4))
    script.after_each = lambda: scheduler_of(stream).check()
    stream.run(Listed(crowd.windows))
    assert len(crowd.came) == len(crowd.guests)
    crowd.check_ends()
    assert all(set(window.attempts.values()) == {1} for window in crowd.windows)
    assert scheduler_of(stream).state.pages.used == 0
    assert (scheduler_of(stream).state.pages.remaining == 0).all(), "pages wait for rows that are not to come"
    assert planner.ended


def test_a_guest_is_told_tokens_while_a_window_is_planned() -> None:
    inbox, (one, told), planner = GuestInbox(), guest([1, 2, 3], 60), Delaying(40)
    first, second = (window_of([[5, i] for i in range(9)], [4] * 9) for _ in range(2))
    counts: list[int] = []
    told.on_sampled = lambda: counts.append(len(planner.submitted) if not planner.submitted[-1].looks <= 0 else 0)
    inbox.put(one)
    planner.submitted += [Delayed(lambda: None, 1)] * 20  # what is submitted is done after 21 steps
    beside(Script(inbox), inbox, planner).run(Listed([first, second]))
    assert told.tokens == [0] * 60
    assert sum(count > 20 for count in counts) > 20
    assert len(first.ended) == len(second.ended) == 9


def test_a_stream_does_the_same_each_time_where_planning_takes_as_many_steps() -> None:
    def steps() -> list[list[int]]:
        inbox = GuestInbox()
        script = Script(inbox, {7: partial(inbox.put, guest([1, 2, 3], 30)[0])})
        windows = [window_of([[n, i] for i in range(20)], [3 + i for i in range(20)]) for n in range(3)]
        beside(script, inbox, Delaying(5)).run(Listed(windows))
        return [requests.tolist() for requests in script.in_step]

    assert steps() == steps()


class GivingUp(Script):
    """Gives up what was not begun of a window after some steps; nothing of it may begin after that."""

    def __init__(self, inbox: GuestInbox, after: int) -> None:
        super().__init__(inbox)
        self._after, self.gone = after, set[int]()

    @property
    def interrupts(self) -> bool:
        return self.steps >= self._after and not self.gone

    def given_up(self, window: Window) -> GivenUp:
        return GivenUp.NOT_BEGUN if self.interrupts else GivenUp.NONE

    def dropped(self, window: Window, requests: NDArray[np.int32]) -> None:
        self.gone |= set(requests.tolist())

    def begun(self, window: Window, requests: NDArray[np.int32]) -> None:
        super().begun(window, requests)
        assert self.gone.isdisjoint(requests.tolist()), "a row begins that was given up"


def test_rows_that_are_given_up_do_not_begin_while_the_others_are_planned() -> None:
    inbox = GuestInbox()
    script = GivingUp(inbox, 6)
    window = window_of([[5, i] for i in range(60)], [4 + i % 9 for i in range(60)])
    planner = Delaying(40)
    planner.submitted += [Delayed(lambda: None, 1)] * 20  # what is submitted is done after 21 looks
    beside(script, inbox, planner).run(Listed([window]))
    assert 0 < len(script.gone) < 60
    assert set(window.ended) == set(range(60)) - script.gone


def test_a_row_that_ends_while_its_equal_is_planned_does_not_run_again() -> None:
    inbox = GuestInbox()
    windows = [window_of([[5, 6, 7, 8]] * 8, [3, 5, 7, 9, 11, 13, 15, 17]) for _ in range(3)]
    beside(Script(inbox), inbox, Delaying(9)).run(Listed(windows))
    assert [[window.ended[i][0] for i in range(8)] for window in windows] == [[3, 5, 7, 9, 11, 13, 15, 17]] * 3


def test_an_engine_that_dies_while_a_window_is_planned_loses_no_row() -> None:
    inbox, (one, told), planner = GuestInbox(), guest([1, 2, 3], 60), Delaying(9)
    windows = [window_of([[n, i] for i in range(20)], [20 + n] * 20) for n in range(3)]

    class Dying(RecordedEngine):
        """Dies once, of a step while the second window is planned."""

        died = False

        def execute(self, step: Any) -> Any:
            if not Dying.died and len(windows[0].ended) > 5 and not planner.submitted[-1].looks <= 0:
                Dying.died = True
                raise RuntimeError("an illegal memory access was encountered")
            return super().execute(step)

    inbox.put(one)
    beside(Script(inbox), inbox, planner, host=Engines(lambda: Dying(COST))).run(Listed(windows))
    assert Dying.died
    assert told.tokens == [0] * 60
    assert [sorted(window.ended) for window in windows] == [list(range(20))] * 3


def test_what_planning_raises_is_raised_by_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()

    def fail(*_: Any) -> None:
        failing.set()
        raise MemoryError("no room for a tree")

    monkeypatch.setattr(PreparedShard, "planned", fail)
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 60)
    inbox.put(one)
    script = Script(inbox)
    script.after_each = lambda: None if failing.wait(60.0) else pytest.fail("nothing was planned")
    with pytest.raises(MemoryError, match="no room for a tree"):
        opened(Engines(), script, inbox).run(Listed([window_of([[5, 6]], [3])]))
    assert told.end is not None
    assert told.end.error is not None


def test_a_stream_that_is_stopped_while_a_window_is_planned_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, (one, _), planning = GuestInbox(), guest([1, 2, 3], 200), threading.Event()
    make, window = NextRequests.make, window_of([[5, 6]], [3])
    begun: list[str] = []

    def slow(*args: Any) -> Any:
        begun.append(threading.current_thread().name)
        planning.wait(60.0)
        return make(*args)

    def stop() -> None:
        if begun:
            planning.set()
            raise Stop(time.monotonic())

    monkeypatch.setattr(NextRequests, "make", slow)
    script = Script(inbox)
    script.after_each = stop
    inbox.put(one)
    with pytest.raises(Stop):
        opened(Engines(), script, inbox).run(Listed([window]))
    assert begun[0] not in {thread.name for thread in threading.enumerate()}
    assert not window.ended
