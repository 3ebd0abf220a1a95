"""Steps in parts: halves in turns, prefills beside decodes, and recorded decodes give the answers of one forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.execution import (
    AttentionStream,
    Execution,
    HostLane,
    Interleaved,
    StreamLane,
)
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder, Recorder, rows_of
from llmbatch.engine.gpu.handoff import Handoff
from llmbatch.engine.gpu.microbatch import MicroBatch, halves, order_of, whole
from llmbatch.engine.gpu.step_cost import halves_pay
from llmbatch.engine.model.loader import load_model
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.admission_order import Blend
from llmbatch.scheduler.output import Step
from tests.engine.gpu.test_engine import DEVICE, LAYERS, MAX_TOKENS, PLATFORM, prompts
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

# A device that reads a token of KV in the time of a token's products, and weights in no time: parts pay always.
EAGER = Rates(1.0, 0.0, 0.0, 1.0, 0.0, False)


def step_of(decodes: list[int], prefills: list[tuple[int, int, bool]]) -> Step:
    """A step of decodes after so many tokens, and of chunks: tokens before, tokens, whether one is sampled."""
    count = len(decodes) + len(prefills)
    rows = np.arange(count, dtype=np.int32)
    return Step(
        index=0,
        num_decodes=len(decodes),
        slots=rows + 7,
        requests=rows + 3,
        starts=np.array([*decodes, *(start for start, _, _ in prefills)], np.int32),
        counts=np.array([1] * len(decodes) + [tokens for _, tokens, _ in prefills], np.int32),
        samples=np.array([True] * len(decodes) + [samples for _, _, samples in prefills]),
        block_tables=np.zeros((count + 7, 1), np.int32),
    )


STEPS = st.builds(
    step_of,
    st.lists(st.integers(0, 1000), max_size=9),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), max_size=5),
).filter(lambda step: step.num_tokens >= 2)


def tokens_of(step: Step) -> list[tuple[int, int, int]]:
    """Slot, request and position of each token."""
    return [
        (slot, request, position)
        for slot, request, start, count in zip(
            step.slots.tolist(), step.requests.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        )
        for position in range(start, start + count)
    ]


@given(STEPS)
def test_halves_are_the_whole_in_its_order(step: Step) -> None:
    parts = halves(step)
    assert sorted(token for part in parts for token in tokens_of(part.step)) == sorted(tokens_of(step))
    prefilled = [t for part in parts for t in tokens_of(part.step)[part.step.num_decodes :]]
    assert prefilled == tokens_of(step)[step.num_decodes :]
    for part in parts:
        assert part.step.num_tokens >= 1
        assert (part.step.counts >= 1).all()
        assert (part.step.counts[: part.step.num_decodes] == 1).all()
        assert part.step.samples[: part.step.num_decodes].all()


@given(STEPS)
def test_halves_are_alike(step: Step) -> None:
    one, other = (part.step for part in halves(step))
    prefills = step.num_tokens - step.num_decodes
    if prefills >= step.num_decodes:
        assert abs(one.num_tokens - other.num_tokens) <= 1
    read = [int(part.starts[: part.num_decodes].sum()) + part.num_decodes for part in (one, other)]
    longest = int(step.starts[: step.num_decodes].max(initial=0)) + 1
    assert abs(read[0] - read[1]) <= 2 * longest


@given(STEPS)
def test_what_parts_sample_is_found_in_the_order_of_the_step(step: Step) -> None:
    for parts in (whole(step), halves(step)):
        sampled = np.concatenate([part.step.requests[part.step.samples] for part in parts])
        assert sampled[order_of(parts)].tolist() == step.requests[step.samples].tolist()


def test_turns_are_taken_until_one_ends() -> None:
    turns, log = Handoff(), list[str]()

    def work(name: str, times: int) -> Callable[[], str]:
        def run() -> str:
            for _ in range(times):
                log.append(name)
                turns.switch()
            return name.upper()

        return run

    assert turns.run(work("a", 2), work("b", 4)) == ("A", "B")
    assert turns.run(work("a", 3), work("b", 1)) == ("A", "B")
    assert "".join(log) == "ababbb" + "abaa"


@pytest.mark.parametrize("first", [True, False])
def test_what_one_raises_is_raised_when_the_other_has_ended(first: bool) -> None:
    turns, log = Handoff(), list[int]()

    def fail() -> None:
        turns.switch()
        raise RuntimeError("no")

    def count() -> None:
        for i in range(3):
            log.append(i)
            turns.switch()

    with pytest.raises(RuntimeError, match=r"^no$"):
        turns.run(*((fail, count) if first else (count, fail)))
    assert log == [0, 1, 2]
    turns.run(count, count)


class Noted:
    """An execution whose decisions are noted."""

    def __init__(self, execution: Execution) -> None:
        self.run, self.attend = execution.run, execution.attend
        self._execution = execution
        self.parts: list[int] = []

    def cut(self, step: Step) -> tuple[MicroBatch, ...]:
        parts = self._execution.cut(step)
        self.parts.append(len(parts))
        return parts


class Again:
    """Repeats work by doing it again, on a device that records nothing; counts."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        work()

        def repeat() -> None:
            self.repeated += 1
            work()

        return repeat

    def seconds(self, repeat: Callable[[], None]) -> float:
        return 0.0


def lane() -> AttentionStream:
    return StreamLane(DEVICE) if DEVICE.type == "cuda" else HostLane()


def test_answers_of_halves_are_those_of_generate(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_model_folder(tmp_path_factory.mktemp("llama"), "llama", layers=LAYERS)
    rows = prompts()
    expected = generate(tiny_model("llama", layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded = load_model(folder, dtype="float32", platform=PLATFORM)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    noted = Noted(Interleaved(EAGER, lane()))
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=4, execution=noted)
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    assert golden.cached > 0
    assert 2 in noted.parts


def test_answers_of_recorded_steps_are_those_of_generate(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_model_folder(tmp_path_factory.mktemp("llama"), "llama", layers=LAYERS)
    rows = prompts()
    expected = generate(tiny_model("llama", layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded = load_model(folder, dtype="float32", platform=PLATFORM)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    golden.num_pages = 60
    recorder: Recorder | Any = GraphRecorder() if DEVICE.type == "cuda" else Again()
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=4, recorder=recorder)
    engine.record((1, 3, len(rows)))
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    if isinstance(recorder, Again):
        assert recorder.recorded == 3
        assert recorder.repeated > 0


def test_rows_are_padded_by_an_eighth_at_most() -> None:
    padded = [rows_of(count) for count in range(1, 513)]
    assert all(count <= rows <= 1.125 * count + 1 for count, rows in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) <= 60


def test_halves_pay_where_reads_are_long_and_tokens_hide_the_weights() -> None:
    rates = Rates(1.0, 0.0, 0.0, 0.02, 200.0, False)
    short, long = [0] * 100, [100] * 100
    assert halves_pay(step_of(long, [(0, 900, True)]), rates)
    assert not halves_pay(step_of(short, [(0, 900, True)]), rates)  # hardly anything is read
    assert not halves_pay(step_of([10_000], []), rates)  # there is one token
    assert not halves_pay(step_of([10] * 150, []), rates)  # the weights would be read twice, and bind


def test_halves_do_not_pay_where_each_fills_up_tiles_of_experts() -> None:
    rates = Rates(1.0, 0.0, 0.0, 0.02, 200.0, False, expert_share=0.25, tile_seconds=600.0, tile_rows=64)
    assert not halves_pay(step_of([100] * 100, [(0, 900, True)]), rates)
