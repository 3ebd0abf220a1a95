"""Guests beside windows and alone: what they are told, and what becomes of them when anything goes wrong."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmbatch.runtime.stream
from llmbatch.engine.base import StreamEngine
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.protocols import Stop
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.scheduler.output import FinishReason
from tests.runtime.test_pool_limits import Hosting, accelerated_engine, torch_engine, window_of
from tests.runtime.test_stream import Engines, Listed, Mortal, Window
from tests.support.examples import examples
from tests.support.golden import generate
from tests.support.guests import Crowd, Script, Told, all_of, guest
from tests.support.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder
from tests.support.workloads import COST

POOL = Pool(400, 4)
BUDGET = Scheduling(max_running=8)


def opened(
    host: Any, script: Script, inbox: GuestInbox, *, pool: Pool = POOL, latency: Latency | None = None
) -> Stream[Window]:
    return Stream.open(host, pool, COST, BUDGET, script, inbox=inbox, latency=latency)


def scheduler_of(stream: Stream[Window]) -> Any:
    now: Any = stream._current.now
    return now._run.scheduler


class Counting(RecordedEngine):
    """Counts how often requests were numbered anew."""

    def __init__(self) -> None:
        super().__init__(COST)
        self.rebound = 0

    def rebind(self, requests: RequestBatch) -> None:
        self.rebound += 1
        super().rebind(requests)

    def extend(self, requests: RequestBatch, rows: Any) -> None:
        super().rebind(requests)


def test_a_guest_without_any_window_is_told_its_tokens_and_its_end() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 4)
    script = Script(inbox)
    inbox.put(one)
    totals = opened(Engines(), script, inbox).run(Listed([]))
    assert told.tokens == [0, 0, 0, 0]
    assert told.end is not None
    assert (told.end.reason, told.end.tokens.tolist(), told.end.error) == (FinishReason.LENGTH, [0] * 4, None)
    assert totals.ended == 0, "guests are no rows"


def test_a_guest_that_comes_when_nothing_runs_is_answered() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3])
    script = Script(inbox, {99: lambda: inbox.put(one)})
    opened(Engines(), script, inbox).run(Listed([window_of([[5, 6]], [3])]))
    assert script.steps < 99
    assert told.end is not None


def test_a_guest_joins_a_job_without_numbering_anything_anew() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3])
    window, engine = window_of([[5, i] for i in range(30)], [40] * 30), Counting()
    script, rebound = Script(inbox, {7: lambda: inbox.put(one)}), list[int]()
    told.on_sampled = lambda: rebound.append(engine.rebound)
    opened(Hosting(engine), script, inbox).run(Listed([window]))
    assert told.end is not None
    assert told.tokens == [0] * 5
    assert rebound == [0] * 5
    assert sorted(window.ended) == list(range(30)), "observers are told of rows alone"


def test_a_guest_is_in_the_step_after_it_came() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3])
    script = Script(inbox, {7: lambda: inbox.put(one)})
    begun: list[int] = []
    told.on_sampled = lambda: begun.append(script.steps)
    opened(Engines(), script, inbox).run(Listed([window_of([[5, i] for i in range(30)], [40] * 30)]))
    assert begun[0] == 7, "it was sampled in the eighth step"


def test_a_window_joins_while_a_guest_runs() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 60)
    late: list[Window] = []
    window = window_of([[5, i] for i in range(9)], [4] * 9)
    script = Script(inbox, {20: lambda: late.append(window)})

    class Later:
        def next(self, wait: bool) -> Window | None:
            assert not wait, "the thread that steps must not wait where guests may come"
            return late.pop() if late else None

    inbox.put(one)
    opened(Engines(), script, inbox).run(Later())
    assert len(window.ended) == 9
    assert told.tokens == [0] * 60
    assert told.end is not None


def test_the_pages_of_a_guest_that_left_are_free_within_two_steps() -> None:
    inbox, (one, told) = GuestInbox(), guest([1] * 300, 200)
    (other, other_told), free = guest([2, 3], 120), dict[int, int]()
    script = Script(inbox, {20: lambda: inbox.leave(one)})
    stream = opened(Engines(), script, inbox)
    script.after_each = lambda: free.update({script.steps: scheduler_of(stream).state.pages.available})
    inbox.put(one)
    inbox.put(other)
    stream.run(Listed([]))
    assert told.end is not None
    assert (told.end.reason, told.end.error) == (FinishReason.CANCELLED, None)
    assert told.end.tokens.tolist() == told.tokens
    assert len(told.tokens) < 25
    assert free[20] < POOL.num_pages - 300 // 4
    assert free[22] > POOL.num_pages - 20
    assert other_told.tokens == [0] * 120


def test_a_guest_that_leaves_before_it_runs_is_told_so() -> None:
    inbox, (one, told), (other, other_told) = GuestInbox(), guest([1, 2]), guest([3])
    inbox.put(one)
    inbox.put(other)
    inbox.leave(one)
    opened(Engines(), Script(inbox), inbox).run(Listed([]))
    assert told.end is not None
    assert (told.end.reason, told.tokens) == (FinishReason.CANCELLED, [])
    assert other_told.tokens == [0] * 5


def test_a_guest_may_be_left_twice() -> None:
    inbox, (one, told), (other, other_told) = GuestInbox(), guest([1, 2]), guest([3])
    for each in (one, other):
        inbox.put(each)
    for _ in range(2):
        inbox.leave(one)

    def leave_twice() -> None:
        inbox.leave(other)
        inbox.leave(other)

    opened(Engines(), Script(inbox, {2: leave_twice}), inbox).run(Listed([]))
    assert told.end is not None
    assert other_told.end is not None
    assert (told.end.reason, other_told.end.reason) == (FinishReason.CANCELLED, FinishReason.CANCELLED)


def test_a_guest_that_has_ended_may_leave() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2], 2)
    script = Script(inbox, {1000: lambda: inbox.leave(one)})
    inbox.put(one)
    opened(Engines(), script, inbox).run(Listed([]))
    assert told.end is not None
    assert told.end.reason == FinishReason.LENGTH


def test_more_guests_than_spare_rows_and_longer_ones_than_there_is_room_for_are_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llmbatch.runtime.stream, "_SPARE_ROWS", 3)
    monkeypatch.setattr(llmbatch.runtime.stream, "_SPARE_TOKENS", 40)
    inbox, guests = GuestInbox(), [guest([1 + i] * (5 + 90 * (i == 4)), 9) for i in range(11)]
    acts: dict[int, Callable[[], object]] = {3 + i // 2: lambda: None for i in range(11)}
    for step in acts:
        due = [one for i, (one, _) in enumerate(guests) if 3 + i // 2 == step]
        acts[step] = partial(all_of, [partial(inbox.put, one) for one in due])
    window, engine = window_of([[5, i] for i in range(30)], [25] * 30), Counting()
    opened(Hosting(engine), Script(inbox, acts), inbox).run(Listed([window]))
    assert all(told.tokens == [0] * 9 for _, told in guests)
    assert sorted(window.ended) == list(range(30))
    assert {length for length, _ in window.ended.values()} == {25}
    assert engine.rebound >= 3


def test_those_that_are_due_have_spare_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.runtime.stream, "_SPARE_ROWS", 3)
    inbox, flood, (one, told) = GuestInbox(), [guest([2, i], due=math.inf) for i in range(9)], guest([1, 2, 3])
    script = Script(inbox, {7: partial(all_of, [partial(inbox.put, each) for each in (*(a for a, _ in flood), one)])})
    begun: list[int] = []
    told.on_sampled = lambda: begun.append(script.steps)
    opened(Engines(), script, inbox).run(Listed([window_of([[5, i] for i in range(30)], [40] * 30)]))
    assert begun == [7, 8, 9, 10, 11], "it was sampled in the eighth step"
    assert all(each.tokens == [0] * 5 for _, each in flood)


def test_a_guest_that_is_due_at_no_time_is_answered_before_the_job_ends() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], due=math.inf)
    window = window_of([[5, i] for i in range(60)], [40] * 60)
    script, ended = Script(inbox, {7: lambda: inbox.put(one)}), list[int]()
    told.on_sampled = lambda: ended.append(len(window.ended))
    opened(Engines(), script, inbox).run(Listed([window]))
    assert told.tokens == [0] * 5
    assert max(ended) <= 8, "eight rows run at a time"
    assert len(window.ended) == 60


def test_a_guest_that_the_pool_cannot_hold_has_an_error_and_one_that_it_can_hold_in_part_is_cut() -> None:
    inbox, (large, large_told), (cut, cut_told) = GuestInbox(), guest([1] * 40, 5), guest([2] * 33, 99)
    inbox.put(large)
    inbox.put(cut)
    opened(Engines(), Script(inbox), inbox, pool=Pool(10, 4)).run(Listed([]))
    assert large_told.end is not None
    assert large_told.end.error is not None
    assert large_told.end.error.kind == "too_long"
    assert cut_told.tokens == [0] * 7


def test_a_guest_whose_engine_died_goes_on_where_it_was_told_to_be() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 30)
    window = window_of([[5, 1], [6, 2]], [30, 41])
    made: list[object] = []

    class Dying(Mortal):
        """The first of these engines dies in its tenth step."""

        steps = 0

        def execute(self, step: Any) -> Any:
            self.steps += 1
            if len(made) == 1 and self.steps == 10:
                raise RuntimeError("an illegal memory access was encountered")
            return RecordedEngine.execute(self, step)

    def make() -> Dying:
        made.append(engine := Dying(0))
        return engine

    inbox.put(one)
    totals = opened(Engines(make), Script(inbox), inbox).run(Listed([window]))
    assert totals.engine_deaths == 1
    assert told.tokens == [0] * 30
    assert told.end is not None
    assert told.end.error is None
    assert len(window.ended) == 2


def test_a_guest_that_kills_the_engine_twice_has_an_error_and_others_their_answers() -> None:
    inbox, (deadly, deadly_told), (one, told) = GuestInbox(), guest([9], 41), guest([1, 2, 3], 30)
    window = window_of([[5, i] for i in range(9)], [20] * 9)
    script = Script(inbox, {5: lambda: inbox.put(deadly), 99: lambda: inbox.put(one)})
    totals = opened(Engines(lambda: Mortal(41)), script, inbox).run(Listed([window]))
    assert totals.engine_deaths == 2
    assert deadly_told.end is not None
    assert deadly_told.end.error is not None
    assert deadly_told.end.error.message == "the engine died of a step with this request 2 times"
    assert told.tokens == [0] * 30
    assert len(window.ended) == 9


def test_a_stream_that_is_stopped_tells_all_guests() -> None:
    inbox, (running, told), (late, late_told) = GuestInbox(), guest([1, 2, 3], 90), guest([4])

    def stop() -> None:
        inbox.put(late)
        raise Stop(time.monotonic())

    script = Script(inbox, {9: stop})
    inbox.put(running)
    with pytest.raises(Stop):
        opened(Engines(), script, inbox).run(Listed([]))
    for one in (told, late_told):
        assert one.end is not None
        assert one.end.error is not None
    assert not inbox.put(guest([1])[0]), "nobody would be told of it"


@pytest.mark.parametrize("comes", [False, True])
def test_the_load_says_that_guests_took_time_and_that_a_job_is_none(comes: bool) -> None:
    inbox, (one, _) = GuestInbox(), guest([1, 2, 3], 30)
    if comes:
        inbox.put(one)
    stream = opened(Engines(), Script(inbox), inbox)
    stream.run(Listed([window_of([[5, i] for i in range(9)], [20] * 9)]))
    assert (stream.load.guest_share > 0.0) == comes


def test_a_guest_finds_the_pages_of_an_earlier_one() -> None:
    inbox, (first, _), (second, told) = GuestInbox(), guest([7] * 40, 9), guest([*[7] * 40, *[0] * 8, 1, 2], 3)
    script = Script(inbox, {99: lambda: inbox.put(second)})
    inbox.put(first)
    opened(Engines(), script, inbox).run(Listed([]))
    assert told.end is not None
    assert told.end.cached >= 44


def test_a_stream_that_idles_keeps_no_window_in_memory() -> None:
    inbox, alive = GuestInbox(), list[Window | None]()
    windows = [window_of([[5, i] for i in range(3)], [4] * 3)]
    known, source = weakref.ref(windows[0]), Listed(windows)
    windows.clear()

    def look() -> None:
        gc.collect()
        alive.append(known())

    opened(Engines(), Script(inbox, {99: look}), inbox).run(source)
    assert alive == [None]


def test_the_row_timeout_is_one_of_rows() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 50)
    inbox.put(one)
    stream = Stream.open(Engines(), POOL, COST, BUDGET, Script(inbox), inbox=inbox, row_timeout=0.0)
    stream.run(Listed([]))
    assert told.tokens == [0] * 50


@given(st.integers(0, 2**32 - 1), st.booleans())
@examples(40)
def test_every_row_and_every_guest_ends_once_whoever_comes_and_leaves_when(seed: int, bounded: bool) -> None:
    rng, inbox = np.random.default_rng(seed), GuestInbox()
    crowd = Crowd(rng)
    script = Script(inbox, crowd.acts(inbox, int))
    latency = Latency(float(rng.uniform(0.02, 0.2)), 4.0) if bounded else None
    stream = opened(Engines(), script, inbox, pool=Pool(int(rng.integers(30, 120)), 4), latency=latency)
    script.after_each = lambda: scheduler_of(stream).check()
    stream.run(Listed(crowd.windows))
    assert len(crowd.came) == len(crowd.guests)
    crowd.check_ends()
    assert scheduler_of(stream).state.pages.used == 0


@pytest.mark.parametrize(
    ("make", "family", "layers"),
    [
        (torch_engine, "llama", 1),
        (accelerated_engine, "llama", 1),
        *(pytest.param(torch_engine, family, 3, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_answers_are_those_of_generate_whatever_runs_beside(
    make: Callable[[str, int], StreamEngine], family: str, layers: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 256, n).tolist() for n in (33, 5, 21, 7)]
    others = [[*rows[0], 7, 8], rows[1], [9, 1]]
    window, inbox, limits = window_of(rows, [12] * len(rows)), GuestInbox(), [9, 12, 7]
    guests = [guest(prompt, limit) for prompt, limit in zip(others, limits, strict=True)]
    script = Script(inbox, {1 + 3 * i: partial(inbox.put, one) for i, (one, _) in enumerate(guests)})
    engine = make(tiny_model_folder(tmp_path, family, layers=layers), 40)
    opened(Hosting(engine), script, inbox, pool=Pool(40, 4)).run(Listed([window]))
    expected = generate(tiny_model(family, layers=layers), [*rows, *others], [*[12] * len(rows), *limits], [EOS], PAD)
    assert [script.tokens[id(window), i] for i in range(len(rows))] == expected[: len(rows)]
    assert [told.tokens for _, told in guests] == expected[len(rows) :]
    for _, told in guests:
        assert told.end is not None
        assert told.end.tokens.tolist() == told.tokens


def alone(model: str, prompt: list[int], **params: Any) -> list[int]:
    """What a guest is told that has an engine to itself."""
    inbox, (one, told) = GuestInbox(), guest(prompt, 20, **params)
    inbox.put(one)
    opened(Hosting(torch_engine(model, 40)), Script(inbox), inbox, pool=Pool(40, 4)).run(Listed([]))
    return told.tokens


def test_each_guest_is_sampled_by_its_own_parameters(model: str) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_k": 8},
        {"temperature": 1.0, "serial": 77},
        {"stop_token_ids": (3, 4, 5)},
        {},
    ]
    prompt = [40, 41, 42, 43, 44]
    expected = [alone(model, prompt, **dict(params)) for params in asked]
    assert len({tuple(tokens) for tokens in expected[:3]}) == 3
    window, inbox = window_of([[5, i, 6] for i in range(9)], [25] * 9), GuestInbox()
    guests = [guest(prompt, 20, **dict(params)) for params in asked]
    script = Script(inbox, {2 + 3 * i: partial(inbox.put, one) for i, (one, _) in enumerate(guests)})
    opened(Hosting(torch_engine(model, 40)), script, inbox, pool=Pool(40, 4)).run(Listed([window]))
    assert [told.tokens for _, told in guests] == expected


def test_a_stop_string_ends_a_guest_and_log_probabilities_are_told(model: str) -> None:
    from llmbatch.engine.cpu.engine import CpuEngine
    from llmbatch.engine.cpu.platform import HOST
    from llmbatch.engine.model.loader import load_model

    loaded = load_model(model, dtype="float32", platform=HOST)
    engine = CpuEngine(loaded, num_pages=40, page_size=4, decode=lambda tokens: "".join(f"<{t}>" for t in tokens))
    [plain] = generate(tiny_model("llama"), [[40, 41, 42]], [12], [EOS], PAD)
    inbox = GuestInbox()
    stopped, told = guest([40, 41, 42], 12, stop=(f"<{plain[3]}>",))
    spoken, spoken_told = guest([40, 41, 42], 12, logprobs=2, prompt_logprobs=1)
    script = Script(inbox, {2: lambda: inbox.put(stopped), 3: lambda: inbox.put(spoken)})
    opened(Hosting(engine), script, inbox, pool=Pool(40, 4)).run(Listed([window_of([[5, 6]], [20])]))
    assert told.tokens == plain[: plain.index(plain[3]) + 1]
    assert told.end is not None
    assert told.end.reason == FinishReason.STOP
    assert spoken_told.end is not None
    answer, prompt = spoken_told.end.logprobs
    assert answer is not None
    assert prompt is not None
    assert answer.tokens[:, 0].tolist() == spoken_told.tokens == plain
    assert prompt.tokens[:, 0].tolist() == [41, 42]


def ruled(prompt: list[int], limit: int) -> list[int]:
    """What `Rule` says to a prompt: each token follows from the one before and its position."""
    from tests.runtime.test_pipeline import EOS, VOCABULARY

    answer: list[int] = []
    while len(answer) < limit and EOS not in answer:
        last = (prompt + answer)[-1]
        answer.append((last * 31 + (len(prompt) + len(answer) - 1) * 17 + 5) % VOCABULARY)
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_are_decided_ahead_tell_each_token_once_and_none_behind_the_end(seed: int) -> None:
    pytest.importorskip("triton")
    from tests.runtime.test_pipeline import BROKEN, VOCABULARY, ruling_engine

    rng = np.random.default_rng(seed)

    def prompt() -> list[int]:
        return [int(token) for token in rng.integers(0, VOCABULARY, rng.integers(1, 30))]

    rows, inbox = [prompt() for _ in range(20)], GuestInbox()
    window = window_of(rows, [30] * len(rows))
    guests = [(*guest(asked := prompt(), 25), asked) for _ in range(20)]
    script = Script(inbox, {1 + 2 * i: partial(inbox.put, one) for i, (one, _, _) in enumerate(guests)})
    script.acts[20] = lambda: inbox.leave(guests[9][0])
    stream = opened(Hosting(ruling_engine(60)), script, inbox, pool=Pool(60, 4))
    script.after_each = lambda: scheduler_of(stream).check()
    stream.run(Listed([window]))
    for i, (_, told, asked) in enumerate(guests):
        assert told.end is not None
        expected = ruled(asked, 25)
        if told.end.reason == FinishReason.ERROR:
            assert BROKEN in [asked[-1], *expected]
        elif told.end.reason == FinishReason.CANCELLED:
            assert i == 9
            assert told.tokens == expected[: len(told.tokens)]
        else:
            assert told.tokens == told.end.tokens.tolist() == expected
    for i, row in enumerate(rows):
        if window.ended[i][1] < FinishReason.ERROR:
            assert script.tokens[id(window), i] == ruled(row, 30)


def test_where_nobody_can_come_a_source_is_waited_for() -> None:
    waits: list[bool] = []

    class Asked(Listed):
        def next(self, wait: bool) -> Window | None:
            waits.append(wait)
            return super().next(wait)

    Stream.open(Engines(), POOL, COST, BUDGET, Script(GuestInbox())).run(Asked([window_of([[5, 6]], [3])]))
    assert waits[-1]
    assert Told().end is None
