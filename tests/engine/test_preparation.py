"""What is measured of a device before a job, what is kept of it, and what the user is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine import preparation
from llmbatch.engine.calibration import calibrate, memory_profile, microbenchmarks
from llmbatch.engine.calibration.device_cost import cost_model
from llmbatch.engine.calibration.memory_profile import MemoryHeadroom
from llmbatch.engine.calibration.store import DeviceCalibration, FittedStrategy
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.factory import EngineFactory
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.memory import memory_of_weights, size_pool
from llmbatch.engine.model.config import ModelConfig, describe_model
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.preparation import prepare
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.errors import ModelError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.perf_model.collectives import on_joined, with_sums
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.scheduler.token_budget import most_tokens

CARD = torch.device("cuda", 0)
PLATFORM = Platform(CARD, GpuOps(CARD), PAGE_SIZE, max_running=64)
HARDWARE = Hardware(name="card", compute=1e12, bandwidth=1e11, memory=1e10)
ROOM = 1 << 20


def fitted(gain: float, exponent: float) -> FittedStrategy:
    return FittedStrategy(HARDWARE, exponent, cascade=True, share_near=1.0, largest_miss=0.0, gain=gain)


class Card:
    """A card that is not there, with what was measured of it."""

    def __init__(self) -> None:
        self.room = MemoryHeadroom(ROOM, None)
        self.calibration = DeviceCalibration({"sequential": fitted(1.0, 1.0), "interleaved": fitted(1.3, 2.5)})
        self.calibrated = 0

    def calibrate(self, cost: CostModel, *_: Any) -> DeviceCalibration:
        assert cost.cascade
        self.calibrated += 1
        return self.calibration


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    here = Card()
    properties = SimpleNamespace(name="Card", total_memory=1 << 30)
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(
        preparation, "choose_attention", lambda *_, **__: (SimpleNamespace(cascade=True, name="triton"), ("a note",))
    )
    monkeypatch.setattr(memory_profile, "measure_room", lambda *_, **__: here.room)
    monkeypatch.setattr(microbenchmarks, "measure_device", lambda *_: replace(HARDWARE, name="measured"))
    monkeypatch.setattr(calibrate, "calibrate_device", here.calibrate)
    return here


@pytest.fixture
def described(model: str) -> ModelConfig:
    return describe_model(model, dtype="float32", device=CARD)


def options(**given: Any) -> Options:
    return Options.build(model="m", prompt="text", max_tokens=1, **given)


def prepared(
    described: ModelConfig, *, streamed: StreamedWeights | None = None, ranks: int = 1, **given: Any
) -> EngineFactory:
    asked, platform = options(tensor_parallel=ranks, **given), replace(PLATFORM, ranks=ranks)
    loaded: Any = SimpleNamespace(
        attention={}, dtype=torch.float32, kv_type=described.kv_type, device=CARD, streamed=streamed, files=()
    )
    pool = size_pool(platform, described, asked)
    return prepare(platform, described, loaded, asked, Scheduling(max_running=64), pool)


def test_pages_get_what_the_largest_step_leaves(card: Card, described: ModelConfig) -> None:
    pages = ROOM // (described.bytes_per_token * PAGE_SIZE)
    assert prepared(described).pool == Pool(pages, PAGE_SIZE)
    assert prepared(described, kv_memory=1 << 16).pool.num_pages < pages


def test_a_card_is_calibrated_once(card: Card, described: ModelConfig, tmp_path: Path) -> None:
    first, again = prepared(described), prepared(described)
    assert card.calibrated == 1
    [file] = (tmp_path / "cache" / "calibrations").iterdir()
    told = "the GPU was calibrated for this model in 0 seconds: interleaved is 1.30 x as fast as sequential; "
    told += f"kept in {file}"
    assert first.notes == ("a note", told)
    assert again.notes == ("a note",)
    assert again.cost == first.cost == card.calibration.fitted["interleaved"].cost(first.cost.shape)


def test_the_fastest_strategy_runs_unless_one_is_asked_for(card: Card, described: ModelConfig) -> None:
    assert prepared(described).strategy == "interleaved"
    chosen = prepared(described, overlap="sequential")
    assert (chosen.strategy, chosen.cost.overlap.exponent) == ("sequential", 1.0)


def test_gpus_that_share_a_model_are_calibrated_as_one_and_say_what_they_tell_each_other(
    card: Card, described: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share is measured alone. Their pool is of all of them, and halves of a step do not run beside each other."""
    monkeypatch.setattr(microbenchmarks, "measure_device", lambda *_: replace(HARDWARE, link=1e9))
    linked = replace(card.calibration.fitted["sequential"], hardware=replace(HARDWARE, link=1e9))
    card.calibration = DeviceCalibration({**card.calibration.fitted, "sequential": linked})
    monkeypatch.setattr(preparation, "_OF_NCCL", 1000)
    assert prepared(described).strategy == "interleaved"
    two = prepared(described, ranks=2)
    assert card.calibrated == 2
    assert two.strategy == "sequential"
    left = ROOM - 1000 - 2 * 64 * described.config.vocab_size * 4
    assert two.pool.num_pages == 2 * left // (described.bytes_per_token * PAGE_SIZE)
    assert two.cost == with_sums(linked.cost(two.cost.shape), 2)
    assert two.cost.rates.step_seconds > 0


def test_what_gpus_that_share_a_model_do_is_foreseen(
    card: Card, described: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbenchmarks, "measure_device", lambda *_: replace(HARDWARE, link=1e9))
    foreseen = cost_model(replace(PLATFORM, ranks=2), described, options(tensor_parallel=2))
    alone = cost_model(PLATFORM, described, options())
    assert foreseen == on_joined(alone, 2)


def test_forecasts_go_by_what_was_calibrated_earlier(card: Card, described: ModelConfig) -> None:
    asked = options()
    assert cost_model(PLATFORM, described, asked).hardware.name == "measured"
    after = prepared(described).cost
    assert cost_model(PLATFORM, described, asked) == after


def test_steps_that_cannot_be_recorded_are_named(card: Card, described: ModelConfig) -> None:
    card.room = MemoryHeadroom(ROOM, "it waits")
    found = prepared(described)
    assert not found.records
    assert found.notes[1] == "small steps are not recorded as CUDA graphs, and take longer: it waits"


def test_a_card_whose_layers_come_from_its_host_goes_by_the_link(card: Card, described: ModelConfig) -> None:
    card.room = MemoryHeadroom(ROOM, "its layers come")
    found = prepared(described, streamed=StreamedWeights(1 << 20, 4_000_000, 1e6))
    assert (found.records, found.strategy, card.calibrated) == (False, "sequential", 0)
    assert found.cost.rates.weight_seconds == pytest.approx(4.0, rel=0.01)
    assert found.notes[2:] == (
        "weights do not all fit in the memory for them: 0.00 GB stay there, and 0.00 GB come from the host's memory at "
        "each step, at 0.00 GB/s, beside the computation",
        f"the link is too slow for this: 0.00 GB at 0.00 GB/s take 4.0 s, as long as the products of "
        f"{4.0 / cost_model(PLATFORM, described, options()).rates.seconds_per_token:,.0f} tokens, and KV memory holds "
        f"{found.pool.tokens:,}; raise weights_memory or kv_memory (--weights-memory, --kv-memory), or take weights of "
        "fewer bytes (--dtype fp8), or keys and values in the host's memory (--kv host)",
    )


def test_halves_of_a_step_do_not_share_layers_that_come(card: Card, described: ModelConfig) -> None:
    with pytest.raises(
        ParameterError,
        match=r"^overlap must be sequential or auto where layers come from the host's memory, got 'interleaved'$",
    ):
        memory_of_weights(PLATFORM, described, options(weights="host", weights_memory=1 << 20, overlap="interleaved"))


def test_what_is_in_no_file_is_refused_before_it_is_loaded(described: ModelConfig) -> None:
    with pytest.raises(ModelError, match=r"must all stay in memory, since they are random: take weights='resident'"):
        memory_of_weights(HOST, described, options(weights="disk", weights_memory=1 << 20, load_format="dummy"))


def test_memory_is_measured_for_the_steps_that_hide_what_comes(
    card: Card, described: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def measure(*_: Any, tokens: int, **__: Any) -> MemoryHeadroom:
        measured.append(tokens)
        return card.room

    monkeypatch.setattr(memory_profile, "measure_room", measure)
    token = prepared(described).cost.rates.seconds_per_token
    for hidden in (100, 10_000, 1_000_000):
        streamed = StreamedWeights(1 << 20, 1_000_000, 1e6 / (hidden * token))
        rates = prepared(described, streamed=streamed).cost.rates
        assert most_tokens(rates) == measured[-1]
    assert measured[1] == 8192
    assert 19_000 < measured[2] < 21_500
    assert measured[3] == 32_768


def test_a_calibration_that_cannot_be_kept_is_used(card: Card, described: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    found = prepared(described)
    assert found.strategy == "interleaved"
    assert found.notes[1] == (
        "the GPU is calibrated by every job, since what was measured cannot be kept: [Errno 20] Not a directory: "
        f"'{tmp_path / 'cache' / 'calibrations'}'"
    )


def test_what_steps_took_on_a_processor_is_kept_for_the_next_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    options = Options.build(model="m", prompt="text", max_tokens=1)
    described = describe_model(model, dtype="float32")
    first = EngineFactory(Pool(8, 8), cost_model(HOST, described, options))
    assert first.learnt(first.cost) is first
    assert list((tmp_path / "cache" / "processors").glob("steps-*")) == []
    hardware = replace(first.cost.hardware, compute_efficiency=0.3, attention_efficiency=0.2, weight_overlap=2.5)
    learnt = first.learnt(replace(first.cost, hardware=hardware))
    assert cost_model(HOST, described, options) == learnt.cost
    other = replace(described, dtype=torch.bfloat16)
    assert cost_model(HOST, other, options).hardware.weight_overlap == first.cost.hardware.weight_overlap
    [file] = (tmp_path / "cache" / "processors").glob("steps-*")
    file.write_text('{"compute": -1.0}')
    assert cost_model(HOST, described, options) == first.cost


def test_what_steps_took_on_a_card_ends_with_the_job(card: Card, described: ModelConfig, tmp_path: Path) -> None:
    found = prepared(described)
    assert found.learnt(replace(found.cost, law="bytes")) is found
    assert not (tmp_path / "cache" / "processors").exists()
