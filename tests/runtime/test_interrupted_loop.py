"""Steps that are held between two layers while prompts of guests are computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmbatch.runtime.loops.interrupted_loop
from llmbatch.compilation.decorators import as_python
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.perf_model.step_bound import step_seconds
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.runtime.online.guests import GuestInbox
from llmbatch.runtime.stream import Stream
from llmbatch.scheduler.beside.guests import Latency
from llmbatch.scheduler.beside.held_steps import TokenGaps
from llmbatch.scheduler.output import FinishReason, Step, StepResult
from tests.runtime.test_guests import scheduler_of
from tests.runtime.test_pool_limits import Hosting, torch_engine, window_of
from tests.runtime.test_stream import Engines, Listed, Window
from tests.support.examples import examples
from tests.support.golden import generate
from tests.support.guests import Crowd, Script, guest
from tests.support.models import EOS, PAD, TINY, tiny_model, tiny_model_folder
from tests.support.workloads import COST

POOL = Pool(400, 4)
LAYERS = 4
Act = Callable[[], object]


@pytest.fixture(autouse=True)
def every_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.runtime.loops.interrupted_loop, "_LONG", 0.0)


class Layered(RecordedEngine):
    """Acts between given layers of given steps, the first of each being 1; notes the steps, as they end."""

    def __init__(self, acts: dict[tuple[int, int], Act] | None = None) -> None:
        super().__init__(COST)
        self.acts = acts or {}
        self.whole: list[Step] = []  # in the order in which they ended
        self.held = 0
        self.deadly = -1  # prompt of a request of which it dies

    def execute(self, step: Step) -> StepResult:
        if (self._requests.prompt_lengths[step.requests] == self.deadly).any():
            raise RuntimeError("an illegal memory access was encountered")
        self.whole.append(step)
        return super().execute(step)

    def execute_in_parts(self, step: Step, between: Callable[[], None]) -> StepResult:
        self.held += 1
        number = self.held
        for layer in range(1, LAYERS):
            self.acts.pop((number, layer), lambda: None)()
            between()
        return self.execute(step)


def opened(
    engine: Any,
    script: Script,
    inbox: GuestInbox,
    *,
    pool: Pool = POOL,
    latency: Latency | None = None,
    step_tokens: int | None = None,
) -> Stream[Window]:
    host = engine if isinstance(engine, Engines) else Hosting(engine)
    scheduling = Scheduling(max_running=8, step_tokens=step_tokens)
    return Stream.open(host, pool, COST, scheduling, script, inbox=inbox, latency=latency)


def job(rows: int = 12, tokens: int = 15) -> Window:
    return window_of([[5, i] for i in range(rows)], [tokens] * rows)


def test_a_guest_that_arrives_between_two_layers_has_its_first_token_before_the_step_ends() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3])
    engine = Layered({(7, 2): lambda: inbox.put(one)})
    window, before = job(), list[int]()
    told.on_sampled = lambda: before.append(len(engine.whole))
    opened(engine, Script(inbox), inbox).run(Listed([window]))
    assert before[0] == 7, "six steps had ended, and its own"
    assert engine.whole[6].counts.tolist() == [3]
    assert told.tokens == [0] * 5
    assert {length for length, _ in window.ended.values()} == {15}


def test_a_guest_that_arrives_between_two_steps_has_a_step_of_its_own() -> None:
    inbox, (one, _) = GuestInbox(), guest([1, 2, 3])
    engine = Layered()
    opened(engine, Script(inbox, {7: lambda: inbox.put(one)}), inbox).run(Listed([job()]))
    assert engine.whole[7].counts.tolist() == [3]


def test_guests_alone_share_steps() -> None:
    inbox, (one, _), (two, _) = GuestInbox(), guest([1, 2, 3], 20), guest([4, 5], 20)
    engine = Layered()
    inbox.put(one)
    opened(engine, Script(inbox, {5: lambda: inbox.put(two)}), inbox).run(Listed([]))
    assert engine.whole[5].counts.tolist() == [1, 2]


def test_one_step_of_prompts_is_taken_between_two_steps_of_the_job_and_the_next_between_its_layers() -> None:
    inbox, (one, _), (two, told) = GuestInbox(), guest([1, 2, 3]), guest([4, 5])
    engine, seen = Layered(), list[int]()
    script = Script(inbox, {7: lambda: inbox.put(one), 8: lambda: inbox.put(two)})
    told.on_sampled = lambda: seen.append(script.steps)
    opened(engine, script, inbox).run(Listed([job()]))
    assert [step.num_tokens for step in engine.whole[7:9]] == [3, 2]
    assert seen[0] == 8, "the step of the job that held it had begun, and not ended"


def test_a_guest_that_is_due_at_no_time_waits_for_the_step_to_end() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], due=math.inf)
    engine = Layered({(7, 2): lambda: inbox.put(one)})
    opened(engine, Script(inbox), inbox).run(Listed([job()]))
    assert told.tokens == [0] * 5
    first = next(step for step in engine.whole if (step.counts == 3).any())
    assert len(first.counts) > 1


def steps_before_its_first_token() -> list[int]:
    """Count the steps that had ended at each token of a guest that came between two layers of the seventh."""
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3])
    engine, before = Layered({(7, 2): lambda: inbox.put(one)}), list[int]()
    told.on_sampled = lambda: before.append(len(engine.whole))
    opened(engine, Script(inbox), inbox, latency=Latency(100.0, 4.0, prompts_apart=True)).run(Listed([job()]))
    assert told.tokens == [0] * 5
    return before


def test_a_step_that_has_a_bound_is_held_for_a_guest() -> None:
    before = steps_before_its_first_token()
    assert before[0] == 7, "six steps had ended, and its own"


def test_a_bounded_step_is_not_held_where_a_guest_would_wait_too_long_for_its_next_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TokenGaps, "room", lambda gaps, now: 0.0)
    before = steps_before_its_first_token()
    assert before[0] == 8, "the seventh had ended as well"


def test_a_step_beside_a_guest_that_decodes_has_a_part_of_the_bound() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 3)
    engine, loads = Layered(), list[float]()
    script = Script(inbox, {3: lambda: inbox.put(one)})
    stream = opened(engine, script, inbox, latency=Latency(100.0, 4.0, prompts_apart=True))
    script.after_each = lambda: loads.append(scheduler_of(stream).state.guests.counts[0].within)
    stream.run(Listed([job(40)]))
    assert told.tokens == [0] * 3
    beside = [within for within in loads if within < 100.0]
    assert len(beside) == 2, "its second and its third token"
    assert max(beside) <= 48.0


def test_each_step_that_computes_a_part_of_a_prompt_counts_as_one_that_guests_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, (one, told), waits = GuestInbox(), guest([1] * 1000, 3), list[bool]()
    few = as_python(step_seconds)(COST.rates, 4.0, 400, 12, 0.0, 1000.0)  # for 400 tokens

    def short_steps(gaps: TokenGaps, now: float, *, wait: bool) -> float:
        waits.append(wait)
        return few

    monkeypatch.setattr(TokenGaps, "step_seconds", short_steps)
    monkeypatch.setattr(TokenGaps, "room", lambda gaps, now: 0.0)
    engine = Layered({(7, 2): lambda: inbox.put(one)})
    opened(engine, Script(inbox), inbox, latency=Latency(100.0, 4.0, prompts_apart=True)).run(Listed([job()]))
    assert told.tokens == [0] * 3
    parts = [(step.counts[step.num_decodes :] > 20).any() for step in engine.whole[7:]]
    assert sum(parts) > 1
    assert waits[7:] == parts


def test_a_prompt_longer_than_a_step_waits_for_the_job_s_next_one() -> None:
    inbox, (one, told) = GuestInbox(), guest([1] * 100, 3)
    engine = Layered({(7, 2): lambda: inbox.put(one)})
    opened(engine, Script(inbox), inbox, step_tokens=64).run(Listed([job()]))
    assert told.tokens == [0] * 3
    first = next(step for step in engine.whole if (step.counts > 30).any())
    assert len(first.counts) > 1


def test_a_guest_for_whom_pages_must_be_taken_from_the_job_waits_for_its_next_step() -> None:
    inbox, (one, told) = GuestInbox(), guest([1] * 200, 3)
    engine = Layered({(30, 1): lambda: inbox.put(one)})
    window = job(8, 60)
    stream = opened(engine, Script(inbox), inbox, pool=Pool(100, 4))
    totals = stream.run(Listed([window]))
    assert told.tokens == [0] * 3
    assert totals.preemptions > 0
    assert len(window.ended) == 8
    assert scheduler_of(stream).state.pages.used == 0


def test_a_guest_finds_no_page_that_the_held_step_is_to_write() -> None:
    inbox, (one, told), (two, found) = GuestInbox(), guest([*[1] * 40, 2]), guest([*[1] * 40, 3])
    engine = Layered({(1, 2): lambda: inbox.put(one), (2, 2): lambda: inbox.put(two)})
    opened(engine, Script(inbox), inbox).run(Listed([window_of([[1] * 40], [9])]))
    assert engine.whole[0].counts.tolist() == [41]
    assert (told.end and told.end.cached, found.end and found.end.cached) == (0, 40)


def test_a_guest_that_leaves_while_a_step_is_held_is_withdrawn_after_it() -> None:
    inbox, (one, told) = GuestInbox(), guest([1, 2, 3], 50)
    other, other_told = guest([7], 3)

    def leave() -> None:
        inbox.leave(one)
        inbox.put(other)

    engine = Layered({(7, 2): lambda: inbox.put(one), (9, 2): leave})
    opened(engine, Script(inbox), inbox).run(Listed([job()]))
    assert told.end is not None
    assert (told.end.reason, len(told.tokens)) == (FinishReason.CANCELLED, 3)
    assert other_told.tokens == [0] * 3


def test_a_guest_whose_prompt_kills_the_engine_is_blamed_and_not_the_rows_of_the_held_step() -> None:
    inbox, (deadly, told) = GuestInbox(), guest([9] * 11)
    engines: list[Layered] = []

    def make() -> Layered:
        engines.append(engine := Layered({(5, 2): lambda: inbox.put(deadly)} if not engines else {}))
        engine.deadly = 11
        return engine

    window = job(9, 20)
    totals = opened(Engines(make), Script(inbox), inbox).run(Listed([window]))
    assert totals.engine_deaths == 2
    assert told.end is not None
    assert told.end.error is not None
    assert len(window.ended) == 9
    assert not window.errors


@given(st.integers(0, 2**32 - 1), st.sampled_from([math.inf, 100.0, 0.05]))
@examples(40)
def test_every_row_and_every_guest_ends_once_between_whatever_layers_guests_come(seed: int, bound: float) -> None:
    rng, inbox, engine = np.random.default_rng(seed), GuestInbox(), Layered()
    crowd = Crowd(rng, steps=60)
    engine.acts = crowd.acts(inbox, lambda step: (step, int(rng.integers(1, LAYERS))))
    script = Script(inbox)
    pool, latency = Pool(int(rng.integers(33, 120)), 4), Latency(bound, 4.0, prompts_apart=True)
    stream = opened(engine, script, inbox, pool=pool, latency=latency)
    script.after_each = lambda: scheduler_of(stream).check()
    stream.run(Listed(crowd.windows))
    crowd.check_ends()
    assert scheduler_of(stream).state.pages.used == 0


class Visited:
    """Lets a guest in when a processor's engine comes between two layers for the n-th time."""

    def __init__(self, engine: CpuEngine, visits: dict[int, Act]) -> None:
        self._execute, self._visits = engine.execute_in_parts, visits
        self.times = 0
        vars(engine)["execute_in_parts"] = self.execute_in_parts

    def execute_in_parts(self, step: Step, between: Callable[[], None]) -> StepResult:
        def visit() -> None:
            self.times += 1
            self._visits.pop(self.times, lambda: None)()
            between()

        return self._execute(step, visit)


@pytest.mark.parametrize("apart", [LAYERS, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_step_held_between_any_two_layers_gives_the_answers_of_generate(
    family: str, apart: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Llama and Gemma 2 are joined, those of gpt-oss are not.

    The first of four guests comes between each two layers, each time in another step; `apart` 1 is in every step.
    """
    monkeypatch.setitem(TINY, "num_hidden_layers", LAYERS)
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 60, n).tolist() for n in (33, 5, 21, 7)]
    prompts = [[*rows[0], 7, 8], rows[1], [9, 1], [*rows[2][:17], 3]]
    folder = tiny_model_folder(tmp_path, family)
    expected = generate(tiny_model(family), [*rows, *prompts], [12] * 8, [EOS], PAD)
    for visit in range(1, 3 * (LAYERS - 1) + 1, apart):
        engine: Any = torch_engine(folder, 60)
        inbox, window = GuestInbox(), window_of(rows, [12] * 4)
        guests = [guest(prompt, 12) for prompt in prompts]
        visits = {visit + i: partial(inbox.put, one) for i, (one, _) in enumerate(guests)}
        visited, script = Visited(engine, dict(visits)), Script(inbox)
        stream = opened(engine, script, inbox, pool=Pool(60, 4))
        stream.run(Listed([window]))
        assert visited.times > max(visits)
        assert [script.tokens[id(window), i] for i in range(4)] == expected[:4]
        assert [told.tokens for _, told in guests] == expected[4:]
        assert scheduler_of(stream).state.pages.used == 0
