"""A device whose host attends gives the answers of `generate`, wherever the weights lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

pytest.importorskip("triton")

from llmbatch import LLMOperator
from llmbatch.engine import memory
from llmbatch.engine.calibration.device_cost import cost_model
from llmbatch.engine.calibration.memory_profile import check_room
from llmbatch.engine.calibration.step_timer import StepKind
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.host_attention import DeviceModel
from llmbatch.engine.memory import memory_of_weights, size_pool
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import HOST_PAGE_SIZE, shape_of
from llmbatch.engine.preparation import prepare
from llmbatch.engine.weights.host_layers import CopyStream, PlainCopies
from llmbatch.engine.weights.residency import StreamedWeights, least_memory
from llmbatch.errors import JobError, ModelError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.kvcache.windows import WindowPages
from llmbatch.perf_model.hardware import measure_cpu
from llmbatch.perf_model.residency import with_host_kv
from llmbatch.planning.workload import Scheduling
from llmbatch.scheduler.admission_order import Blend
from tests.engine.gpu.test_engine import DEVICE, prompts
from tests.engine.gpu.test_engine import PLATFORM as RESIDENT
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

DEVICE_ALONE = replace(RESIDENT, copies=CopyStream if DEVICE.type == "cuda" else lambda _: PlainCopies())
PLATFORM = replace(DEVICE_ALONE, attends_on_host=True, page_size=HOST_PAGE_SIZE)
LAYERS = 2
MAX_TOKENS = 6
KEPT = 40  # tokens that layers with windows keep
OTHERS = ("qwen3_moe", "gemma2", "gpt_oss")


def loaded_and_expected(folder: Path, name: str, weights: int | None) -> tuple[LoadedModel, list[list[int]]]:
    path = tiny_model_folder(folder, name, layers=LAYERS)
    rows = prompts()
    expected = generate(tiny_model(name, layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    return load_model(path, dtype="float32", weights_memory=weights, platform=PLATFORM), expected


def engine_of(loaded: LoadedModel, pages: int, window_pages: int = 0) -> CpuEngine:
    model = DeviceModel(loaded.module, loaded.device)
    return CpuEngine(loaded, num_pages=pages, window_pages=window_pages, page_size=4, model=model)


def rounded(value: Any) -> Any:
    """Round all numbers in columns: sums are not made in the same order."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("weights", [None, 1])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_answers_are_those_of_generate_though_rows_are_preempted(
    tmp_path: Path, name: str, weights: int | None
) -> None:
    if name == "gpt_oss" and weights is not None:
        pytest.skip("layers with sinks do not come from the host")
    loaded, expected = loaded_and_expected(tmp_path, name, weights)
    assert (loaded.streamed is None) == (weights is None)
    golden = Golden(prompts(), MAX_TOKENS, page_size=4, spare_pages=3)
    assert golden.run(engine_of(loaded, golden.num_pages), Blend(0.1, 0.2), 16) == expected
    assert golden.preemptions > 0
    assert golden.cached > 0


@pytest.mark.slow
def test_layers_with_windows_have_pages_of_their_own(tmp_path: Path) -> None:
    loaded, expected = loaded_and_expected(tmp_path, "gemma2", None)
    windows = WindowPages(KEPT, 2 * (-(-(KEPT - 1) // 4) + 1))
    golden = Golden(prompts(), MAX_TOKENS, page_size=4, spare_pages=20, windows=windows)
    assert golden.run(engine_of(loaded, golden.num_pages, windows.num_pages), Blend(0.1, 0.2), 16) == expected


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of three layers, of which two buffers do not hold all."""
    return tiny_model_folder(tmp_path_factory.mktemp("three"), "llama", layers=3)


@pytest.fixture
def given(three: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of an operator, on a device where one is asked for."""
    monkeypatch.setattr("llmbatch.engine.devices._accelerated", lambda name: DEVICE_ALONE)
    monkeypatch.setattr("llmbatch.engine.devices._unusable", lambda device: None)
    return {"model": three, "prompt": "text", "max_tokens": 5, "dtype": "float32", "kv_memory": 2**20}


@pytest.mark.parametrize("streams", [False, True])
def test_an_operator_answers_as_on_the_processor(
    given: dict[str, Any], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are drawn, stopped and told of as there."""
    shape = shape_of(describe_model(given["model"], dtype="float32"))
    least = least_memory(shape, is_host=False)
    assert least < shape.weight_bytes
    weights: dict[str, Any] = {"weights": "host", "weights_memory": least} if streams else {}
    monkeypatch.setattr(memory, "free_memory", lambda platform: 10**9)
    text = "abcdef" * 4
    params = [
        json.dumps(one)
        for one in (
            {},
            {"temperature": 1.0, "seed": 3},
            {"stop": "a"},
            {"repetition_penalty": 1.3, "logprobs": 2},
            {"prompt_logprobs": 1},
        )
    ]
    rows = pa.table({"text": [text, text + "x", text + "y", "z", text], "params": params})
    expected = LLMOperator(**given, sampling_params="params")(rows)
    answered = LLMOperator(**given, **weights, sampling_params="params", device="cuda", kv="host")(rows)
    assert rounded(answered.to_pylist()) == rounded(expected.to_pylist())


@pytest.mark.parametrize("weights", [None, 1])
def test_steps_of_others_are_between_layers_only_where_layers_stay(three: str, weights: int | None) -> None:
    """A step of others would bring other layers to where the held one has its own."""
    loaded = load_model(three, dtype="float32", weights_memory=weights, platform=PLATFORM)
    engine, held = engine_of(loaded, 8), list[int]()
    kind = StepKind(prefills=((0, 6),))
    engine.begin(kind.requests(256))
    engine.execute_in_parts(kind.step(4), lambda: held.append(1))
    assert len(held) == (2 if weights is None else 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"attention": "varlen"}, "attention must be auto where kv is host, since the processor attends, got 'varlen'"),
        ({"overlap": "interleaved"}, "overlap must be sequential or auto where kv is host, got 'interleaved'"),
    ],
)
def test_what_the_processor_is_not_asked_is_refused(
    given: dict[str, Any], option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        LLMOperator(**given, **option, device="cuda", kv="host")
    assert str(caught.value) == message


def test_a_processor_has_no_host_beside_it(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        LLMOperator(**given, device="cpu", kv="host")(pa.table({"text": ["a"]}))
    assert str(caught.value) == (
        "kv must be device on a processor, whose memory is the host's (leave it out), got 'host'"
    )


@pytest.mark.parametrize(
    ("types", "part"),
    [
        ({"dtype": "float16"}, "float16 with keys and values in the host's memory"),
        ({"kv_cache_dtype": "fp8"}, "keys and values in fp8 on the processor"),
    ],
)
def test_types_that_a_processor_does_not_attend_in_are_refused(shallow: str, types: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=rf"^model '.*' uses {part}, which is not supported: "):
        describe_model(shallow, device=torch.device("cuda", 0), kv="host", **types)


def test_pages_may_be_of_int8_on_the_host_of_a_device(shallow: str) -> None:
    there = describe_model(shallow, dtype="bfloat16", device=torch.device("cuda", 0), kv="host", kv_cache_dtype="int8")
    assert there.kv_type.name == "int8"


def test_the_pool_is_what_weights_leave_of_the_hosts_memory(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_model(shallow, dtype="float32")
    options = Options.build(model=shallow, prompt="text", max_tokens=1, kv="host")
    weights = int(shape_of(described).weight_bytes)
    monkeypatch.setattr(memory, "available_memory", lambda: weights + (1 << 20))
    resident = size_pool(PLATFORM, described, options, weights=None)
    hosted = size_pool(PLATFORM, described, options, weights=1)
    page = described.bytes_per_token * HOST_PAGE_SIZE
    assert (resident.page_size, hosted.page_size) == (HOST_PAGE_SIZE, HOST_PAGE_SIZE)
    assert (resident.num_pages, hosted.num_pages) == ((weights + (1 << 20)) // 2 // page, (1 << 20) // 2 // page)


def test_weights_get_half_of_a_device_that_has_no_pages(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_model(shallow, dtype="float32")
    whole = int(shape_of(described).weight_bytes)
    monkeypatch.setattr(memory, "free_memory", lambda platform: 8 * whole)
    given: dict[str, Any] = {"model": shallow, "prompt": "text", "max_tokens": 1, "weights": "host"}
    assert memory_of_weights(PLATFORM, described, Options.build(**given)) == 2 * whole
    assert memory_of_weights(PLATFORM, described, Options.build(**given, kv="host")) == 4 * whole
    assert memory_of_weights(PLATFORM, described, Options.build(**given, kv="host", kv_memory=10 * whole)) == 4 * whole


def test_what_the_host_attends_is_said_and_counted(shallow: str) -> None:
    described = describe_model(shallow, dtype="float32")
    options = Options.build(model=shallow, prompt="text", max_tokens=1, kv="host", kv_memory=2**20)
    loaded = load_model(shallow, dtype="float32", weights_memory=1, platform=PLATFORM)
    pool = size_pool(PLATFORM, described, options, weights=1)
    found = prepare(PLATFORM, described, loaded, options, Scheduling(max_running=4), pool)
    assert found.notes[0] == (
        f"keys and values lie in the host's memory, which holds {pool.tokens:,} tokens of them: its processor attends"
    )
    assert found.notes[1].startswith("weights do not all fit in the memory for them: ")
    assert found.attends_on_host
    assert not found.keeps_rates
    device = cost_model(DEVICE_ALONE, described, options)
    by_host = with_host_kv(device, measure_cpu())
    assert found.cost.rates.weight_seconds > device.rates.weight_seconds
    assert found.cost.rates.seconds_per_kv_token == by_host.rates.seconds_per_kv_token
    assert found.cost.rates.seconds_per_pair == by_host.rates.seconds_per_pair


def test_a_step_that_a_device_has_no_room_for_ends_the_job(shallow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(shallow, dtype="float32", platform=PLATFORM)
    pages: list[int] = []

    def make(count: int) -> CpuEngine:
        pages.append(count)
        return engine_of(loaded, count)

    check_room(loaded, make, tokens=10, rows=3, page_size=4)
    assert pages == [3]

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DeviceModel, "__call__", full)
    monkeypatch.setattr("llmbatch.engine.calibration.memory_profile.free_memory", lambda device: 1000)
    advice = "lower step_tokens (--step-tokens) or max_running (--max-running)"
    for streamed, more in ((None, ""), (StreamedWeights(0, 1, 1.0), ", or weights_memory (--weights-memory)")):
        with pytest.raises(JobError) as raised:
            check_room(replace(loaded, streamed=streamed), make, tokens=10, rows=3, page_size=4)
        assert str(raised.value) == (
            f"memory runs out on {loaded.device}: a step of 10 tokens takes more than the 1,000 bytes that are free in "
            f"addition to the weights: {advice}{more}, or take a smaller model"
        )
