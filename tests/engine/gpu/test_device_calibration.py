"""What a device does with a model is measured under each strategy, kept, and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine.calibration.calibrate import calibrate_device, step_kinds
from llmbatch.engine.calibration.step_timer import StepKind, measured
from llmbatch.engine.calibration.store import CalibrationStore, DeviceCalibration, FittedStrategy
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.strategies import Strategy, make_execution
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.outline import KVType
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import ModelShape
from llmbatch.perf_model.work import Rates, Reach
from tests.runtime.test_pipeline import VOCABULARY, Rule

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

HARDWARE = Hardware(name="card", compute=1e12, bandwidth=1e11, memory=1e10)
SHAPE = ModelShape(
    params=1e6,
    params_total=1e6,
    weight_bytes=2e6,
    layers=1,
    hidden_size=64,
    attention_width=64.0,
    kv_bytes_per_token=128.0,
    windows=(0,),
    vocabulary=260,
)


def fitted(gain: float) -> FittedStrategy:
    return FittedStrategy(
        replace(HARDWARE, compute_efficiency=0.5), 1.5, cascade=True, share_near=0.9, largest_miss=0.2, gain=gain
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationStore:
    """Of a card that is not there."""
    properties = SimpleNamespace(name="NVIDIA Card", total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return CalibrationStore(tmp_path, torch.device("cuda", 0), SHAPE, "auto")


def test_every_strategy_is_timed_and_fitted() -> None:
    untyped: Any = Rule()
    config: Any = SimpleNamespace(vocab_size=VOCABULARY)
    loaded = LoadedModel(
        module=untyped,
        config=config,
        eos_token_ids=(),
        dtype=torch.float32,
        kv_type=KVType("float32", 4),
        device=DEVICE,
        context_length=64,
        attention={},
        notes=(),
    )
    kinds = [StepKind(3, 20), StepKind(prefills=((0, 12),)), StepKind(3, 20, ((0, 9),)), StepKind(2, 9, ((4, 8),))]
    pages = max(kind.pages(16) for kind in kinds)
    made: list[str] = []

    def new_engine(name: Strategy, rates: Rates) -> GpuEngine:
        made.append(name)
        execution = make_execution(name, rates, DEVICE)
        return GpuEngine(loaded, TritonAttention(DEVICE), num_pages=pages, page_size=16, execution=execution)

    ceilings = CostModel(SHAPE, HARDWARE, overlap=SEQUENTIAL)
    found = calibrate_device(ceilings, kinds, new_engine)
    assert made == ["sequential", "interleaved"]
    assert found.fitted["sequential"].gain == 1.0
    assert found.fitted["sequential"].exponent == 1.0
    assert found.fitted["interleaved"].gain > 0


def test_the_steps_that_are_timed_fit_the_pool() -> None:
    for tokens in (2_000, 50_000, 10_000_000):
        kinds = step_kinds(tokens)
        assert max(kind.pages(16) * 16 for kind in kinds) <= max(tokens, 256 * 16 + 512)
        assert len(set(kinds)) == len(kinds) or tokens < 50_000
    assert {bool(kind.decodes) + 2 * bool(kind.prefills) for kind in kinds} == {1, 2, 3}


def test_work_of_steps_is_counted() -> None:
    steps = measured([StepKind(3, 20), StepKind(2, 9, ((4, 8), (0, 2)))], [0.1, 0.2], Reach.of([0]))
    columns: Any = (steps.tokens, steps.pairs, steps.kv_tokens, steps.samples, steps.seconds)
    assert [column.tolist() for column in columns] == [
        [3, 12],
        [0, 8 * 4 + 36 + 3],
        [60, 18 + 12 + 2],
        [3, 4],
        [0.1, 0.2],
    ]


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({"sequential": 1.0, "interleaved": 1.2}, "interleaved"),
        ({"sequential": 1.0, "interleaved": 0.8}, "sequential"),
        ({"sequential": 1.0, "interleaved": 1.01}, "sequential"),
    ],
)
def test_a_strategy_is_taken_that_gains_more_than_noise(gains: dict[Strategy, float], best: str) -> None:
    assert DeviceCalibration({name: fitted(gain) for name, gain in gains.items()}).best == best


def test_what_was_measured_is_found_again(kept: CalibrationStore, tmp_path: Path) -> None:
    calibration = DeviceCalibration({"sequential": fitted(1.0), "interleaved": fitted(1.1)})
    assert kept.find() is None
    kept.keep(calibration)
    assert kept.find() == calibration
    device = torch.device("cuda", 0)
    assert CalibrationStore(tmp_path, device, SHAPE, "auto").find() == calibration
    assert CalibrationStore(tmp_path, device, SHAPE, "triton").find() is None
    assert CalibrationStore(tmp_path, device, replace(SHAPE, layers=2, windows=(0, 0)), "auto").find() is None


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"fitted": {"sequential": {"hardware": {"name": "x"}}}}', '{"fitted": {"partitioned": {}}}', "[]"],
)
def test_a_file_that_cannot_be_read_is_measured_again(kept: CalibrationStore, text: str) -> None:
    kept.path.parent.mkdir()
    kept.path.write_text(text)
    assert kept.find() is None


def test_cost_is_that_of_kernels_in_turn_with_the_law_that_was_fitted() -> None:
    cost = fitted(1.0).cost(SHAPE)
    assert (cost.law, cost.overlap.exponent, cost.hardware.compute_efficiency) == ("paper", 1.5, 0.5)
