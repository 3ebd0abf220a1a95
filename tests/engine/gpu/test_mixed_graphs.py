"""Recorded steps with chunks give the tokens of those that are launched, and are recorded where the host is slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine.calibration import memory_profile
from llmbatch.engine.calibration.step_timer import StepKind
from llmbatch.engine.gpu.batch import DeviceBatch
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.mixed import MOST_TOKENS, MixedGraphs, mixed_sizes
from llmbatch.engine.gpu.graphs.recorder import MOST_ROWS, DecodeGraphs, GraphRecorder, RecordedSizes, Recorder
from llmbatch.engine.gpu.model_runner import ModelRunner
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.admission_order import Blend
from tests.engine.gpu.test_engine import DEVICE, LAYERS, MAX_TOKENS, PLATFORM, prompts
from tests.engine.gpu.test_execution import Again
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

PAGE = 16
SIZES = (16, 32, 48)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model_folder(tmp_path_factory.mktemp("llama"), "llama", layers=LAYERS)
    return load_model(folder, dtype="float32", platform=PLATFORM)


class Later(Again):
    """Runs nothing where it records. What it recorded takes so many `times`, one after the other, and then none."""

    def __init__(self, *times: float) -> None:
        super().__init__()
        self._times = iter(times)

    def seconds(self, repeat: Callable[[], None]) -> float:
        return next(self._times, 0.0)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def repeat() -> None:
            self.repeated += 1
            work()

        return repeat


def new_recorder() -> Recorder | Any:
    return GraphRecorder() if DEVICE.type == "cuda" else Again()


def engine_of(loaded: LoadedModel, recorder: Recorder | None, num_pages: int) -> GpuEngine:
    """An engine whose pages hold numbers that are the same for each."""
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=num_pages, page_size=PAGE, recorder=recorder)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for tensor in (*engine.pages.keys.values(), *engine.pages.values.values()):
        tensor[:num_pages].normal_(generator=generator)
        tensor[num_pages:] = float("nan")  # the page to spare
    return engine


def drawn(seed: int) -> StepKind:
    """Decodes and chunks of at most 48 tokens."""
    rng = np.random.default_rng(seed)
    chunks = tuple((int(rng.integers(0, 60)), int(rng.integers(1, 15))) for _ in range(rng.integers(1, 4)))
    return StepKind(int(rng.integers(0, 5)), int(rng.integers(1, 90)), chunks)


def test_tokens_of_recorded_mixes_are_those_of_launched_ones(loaded: LoadedModel) -> None:
    kinds = [drawn(seed) for seed in (3, 4, 11)]  # one of each size
    pages = max(kind.pages(PAGE) for kind in kinds)
    recorder = new_recorder()
    launched, repeated = engine_of(loaded, None, pages), engine_of(loaded, recorder, pages)
    repeated.record((), SIZES)
    before = getattr(recorder, "repeated", 0)
    for kind in kinds:
        found = []
        for engine in (launched, repeated):
            engine.begin(kind.requests(engine.vocabulary))
            step = kind.step(PAGE)
            unfinished = step.num_decodes  # a chunk that is not the last of its prompt
            samples = step.samples.copy()
            samples[unfinished] = len(kind.prefills) == 1
            found.append(engine.execute(replace(step, samples=samples)).tokens.tolist())
        assert found[0] == found[1]
    if isinstance(recorder, Again):
        assert recorder.repeated - before == len(kinds)


def test_answers_of_a_job_whose_chunks_are_recorded_are_those_of_generate(loaded: LoadedModel) -> None:
    rows = prompts()
    expected = generate(tiny_model("llama", layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    golden.num_pages = 60
    recorder = new_recorder()
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=4, recorder=recorder)
    engine.record((), (8, 16))
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    assert golden.cached > 0
    if isinstance(recorder, Again):
        assert recorder.repeated >= 3


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (StepKind(2, 20, ((0, 46),)), True),
        (StepKind(2, 20, ((0, 47),)), False),  # of more tokens than any recorded one
        (StepKind(2, 20), False),  # of decodes alone, none of which was recorded
    ],
)
def test_a_step_that_fits_no_recording_is_launched(loaded: LoadedModel, kind: StepKind, fits: bool) -> None:
    recorder = Later()
    engine = engine_of(loaded, recorder, kind.pages(PAGE))
    engine.record((), SIZES)
    engine.begin(kind.requests(engine.vocabulary))
    engine.execute(kind.step(PAGE))
    assert recorder.repeated == fits


@pytest.mark.parametrize(("kv_seconds", "repeated"), [(0.0, 1), (1.0, 0)])
def test_a_step_that_takes_the_device_longer_than_its_launch_is_launched(
    loaded: LoadedModel, kv_seconds: float, repeated: int
) -> None:
    kind, recorder = StepKind(2, 20, ((0, 3),)), Later()
    engine = engine_of(loaded, recorder, kind.pages(PAGE))
    engine.record((), SIZES, Rates(0.0, 0.0, 0.0, kv_seconds, 0.0, False))
    engine.begin(kind.requests(engine.vocabulary))
    engine.execute(kind.step(PAGE))
    assert recorder.repeated == repeated


@pytest.mark.parametrize(
    ("times", "padded"), [((0.3, 0.2, 0.1), 16), ((0.3, 0.2, 0.2), 32), ((0.3, 0.4, 0.2), 16), ((0.3, 0.4, 0.3), 48)]
)
def test_a_recording_that_takes_as_long_as_a_larger_one_is_not_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], padded: int
) -> None:
    tokens: list[int] = []
    forward = ModelRunner.__call__

    def noted(runner: ModelRunner, batch: DeviceBatch) -> torch.Tensor:
        tokens.append(len(batch.ids))
        return forward(runner, batch)

    kind = StepKind(2, 20, ((0, 3),))
    engine = engine_of(loaded, Later(*times), kind.pages(PAGE))
    engine.record((), SIZES)
    engine.begin(kind.requests(engine.vocabulary))
    monkeypatch.setattr(ModelRunner, "__call__", noted)
    engine.execute(kind.step(PAGE))
    assert tokens == [padded]


def test_the_largest_steps_are_recorded_first(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[str, int]] = []
    monkeypatch.setattr(DecodeGraphs, "record", lambda self, rows: recorded.append(("decodes", rows)))
    monkeypatch.setattr(MixedGraphs, "record", lambda self, tokens: recorded.append(("mixed", tokens)))
    engine_of(loaded, Again(), 1).record((1, 3, 40, MOST_ROWS + 1), (16, 32, 48))
    assert recorded == [("mixed", 48), ("decodes", 40), ("mixed", 32), ("mixed", 16), ("decodes", 3), ("decodes", 1)]


def test_steps_of_few_sampled_rows_make_few_logits(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []

    def forward(_: ModelRunner, batch: DeviceBatch) -> torch.Tensor:
        sampled.append(len(batch.last))
        return torch.zeros(1, 1)

    monkeypatch.setattr(ModelRunner, "__call__", forward)
    engine_of(loaded, Again(), 1).record((), (64, 200, 768))
    assert sampled == [768, 512, 256, 200, 64]


def rates_of(billions: float) -> Rates:
    """Of a model of so many parameters in bfloat16 on a card of 700 TFLOP/s and 3.35 TB/s."""
    return Rates(2e9 * billions / 700e12, 0.0, 0.0, 1.0, 2e9 * billions / 3.35e12, False)


def test_sizes_are_eighths_apart_up_to_what_is_computed_while_a_busy_host_launches() -> None:
    sizes = mixed_sizes(24, rates_of(0.4))
    assert (sizes[0], sizes[-1]) == (32, MOST_TOKENS)
    assert all(32 <= after - before <= max(32, before // 8) for before, after in pairwise(sizes))
    few, rates = mixed_sizes(32, rates_of(8.0)), rates_of(8.0)
    assert few[-1] * rates.seconds_per_token <= 32 * 1.1e-3 < 9 / 8 * few[-1] * rates.seconds_per_token


def test_nothing_is_recorded_of_a_model_whose_steps_do_not_wait_for_the_host() -> None:
    assert mixed_sizes(80, rates_of(120.0)) == ()


@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (16, 16), (17, 32), (48, 48), (49, None)])
def test_a_step_takes_the_smallest_size_that_has_room(tokens: int, size: int | None) -> None:
    sizes = RecordedSizes()
    assert all(sizes.keep(one, 0.0) for one in SIZES)
    assert sizes.find(tokens) == size


def test_memory_of_recordings_is_that_of_the_largest_and_what_is_kept_of_each_other(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Later()

    def taken(_: torch.device, work: Any) -> int:
        before = recorder.recorded
        work()
        return 1000 * (recorder.recorded - before)

    monkeypatch.setattr(memory_profile, "_Untimed", lambda: recorder)
    monkeypatch.setattr(memory_profile, "_taken", taken)
    fixed = engine_of(loaded, Again(), 1).graph_bytes
    attention = TritonAttention(DEVICE)
    measured, reason = memory_profile._record(loaded, attention, rows=3, mixed=(16, 32, 300), page_size=PAGE)
    assert reason is None
    assert measured - fixed == 1000 * (1 + 2) + 1000 * 2 + 1000 * 2
