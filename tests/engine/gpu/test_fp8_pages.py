"""Keys and values in FP8: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llmbatch.choices import DType, KVDType
from llmbatch.engine.calibration.memory_profile import run_largest
from llmbatch.engine.calibration.store import CalibrationStore
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.fp8_linear import Fp8Linear
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder, Recorder
from llmbatch.engine.memory import size_pool
from llmbatch.engine.model.config import ModelConfig, describe_model
from llmbatch.engine.model.loader import LoadedModel, load_weights
from llmbatch.engine.model.outline import shape_of
from llmbatch.engine.model.platform import Platform
from llmbatch.inference.options import Options
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.scheduler.admission_order import Blend, FromFront
from tests.engine.gpu.test_engine import LAYERS, prompts
from tests.engine.gpu.test_execution import Again
from tests.engine.gpu.test_windows import MAX_TOKENS, PAGE, answers_in_windows
from tests.engine.gpu.test_windows import prompts as rows_of_windows
from tests.support.golden import Golden
from tests.support.models import tiny_model_folder

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
CARD = torch.device("cuda", 0)
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512, to_fp8=Fp8Linear)
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < (8, 9), reason="no numbers of FP8"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", layers=LAYERS)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is not there, for what is known before anything runs on it."""
    if torch.cuda.is_available():
        return
    properties = SimpleNamespace(name="Card", total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, found in (("mem_get_info", (1 << 30, 1 << 30)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)


def described(model: str, kv: KVDType = "fp8", dtype: DType = "bfloat16") -> ModelConfig:
    return describe_model(model, dtype=dtype, kv_cache_dtype=kv, device=CARD)


def loaded(model: str, kv: KVDType = "fp8", dtype: DType = "bfloat16") -> LoadedModel:
    return load_weights(described(model, kv, dtype), platform=PLATFORM)


def answers(
    model: LoadedModel, *, page_size: int, step_tokens: int, spare: int = 20, recorder: Any = None
) -> list[list[int]]:
    """Of two tokens each."""
    golden = Golden(prompts(), 2, page_size, spare_pages=spare)
    engine = GpuEngine(
        model, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=page_size, recorder=recorder
    )
    if recorder is not None:
        engine.record((len(golden.rows),))
    return golden.run(engine, Blend(0.1, 0.2), step_tokens)


@cache
def answers_of_whole_prompts(model: str, kv: KVDType) -> list[list[int]]:
    return answers(loaded(model, kv), page_size=16, step_tokens=1000)


@pytest.mark.usefixtures("card")
def test_pages_take_half_the_bytes_in_memory_and_in_plans(model: str) -> None:
    half, whole = described(model), described(model, "auto")
    assert whole.bytes_per_token == 2 * half.bytes_per_token
    assert shape_of(whole).kv_bytes_per_token == 2 * shape_of(half).kv_bytes_per_token
    assert shape_of(whole).weight_bytes == shape_of(half).weight_bytes
    assert run_largest(loaded(model), TritonAttention(DEVICE), tokens=10, rows=3, page_size=16) == (
        3 * 16 * half.bytes_per_token
    )


@pytest.mark.usefixtures("card")
def test_a_pool_holds_twice_the_tokens(model: str) -> None:
    options = Options.build(model="m", prompt="text", max_tokens=1, kv_memory=1 << 20, page_size=4)
    half, whole = (size_pool(replace(PLATFORM, device=CARD), described(model, kv), options) for kv in ("fp8", "auto"))
    assert half.tokens == 2 * whole.tokens


@pytest.mark.usefixtures("card")
def test_a_calibration_is_kept_for_pages_of_its_type(model: str, tmp_path: Path) -> None:
    paths = {CalibrationStore(tmp_path, CARD, shape_of(described(model, kv)), "auto").path for kv in ("fp8", "auto")}
    assert len(paths) == 2


@pytest.mark.usefixtures("card")
def test_answers_depend_on_no_cut_of_the_prompts(model: str) -> None:
    """A row's own keys are read as pages hold them, like those of a prefix: so the same numbers meet in any step."""
    assert answers(loaded(model), page_size=4, step_tokens=16, spare=2) == answers_of_whole_prompts(model, "fp8")


@pytest.mark.usefixtures("card")
def test_most_answers_begin_as_those_of_whole_numbers(model: str) -> None:
    pairs = zip(*(answers_of_whole_prompts(model, kv) for kv in ("fp8", "auto")), strict=True)
    assert sum(one[0] == other[0] for one, other in pairs) >= 4  # of 6 rows of a random model


@pytest.mark.usefixtures("card")
def test_recorded_steps_give_the_tokens_of_others(model: str) -> None:
    recorder: Recorder | Any = GraphRecorder() if DEVICE.type == "cuda" else Again()
    got = answers(loaded(model), page_size=16, step_tokens=1000, recorder=recorder)
    assert got == answers_of_whole_prompts(model, "fp8")
    if isinstance(recorder, Again):
        assert recorder.repeated > 0


@pytest.mark.usefixtures("card")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a gate, which is 0 then
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.slow
def test_window_pages_give_the_answers_of_pages_for_all_layers(tmp_path: Path, name: str) -> None:
    """Nothing is read that was given back: free memory holds no number. Recorded steps of decodes read them, too."""
    found = loaded(tiny_model_folder(tmp_path, name, layers=LAYERS), dtype="float32")
    golden = Golden(rows_of_windows(), MAX_TOKENS, PAGE, spare_pages=60)
    engine = GpuEngine(found, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=PAGE)
    expected = golden.run(engine, FromFront(), 1000)
    recorder: Recorder | Any = GraphRecorder() if DEVICE.type == "cuda" else Again()
    assert answers_in_windows(found, recorder) == expected
    if isinstance(recorder, Again):
        assert recorder.repeated > 0


@pytest.mark.usefixtures("card")
def test_a_pool_holds_twice_the_window_pages(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "gemma3")
    options = Options.build(model="m", prompt="text", max_tokens=1, kv_memory=1 << 20, page_size=4)
    half, whole = (size_pool(replace(PLATFORM, device=CARD), described(folder, kv), options) for kv in ("fp8", "auto"))
    assert whole.windows.num_pages > 0
    assert half.num_pages == pytest.approx(2 * whole.num_pages, rel=0.01)
    assert half.windows.num_pages == pytest.approx(2 * whole.windows.num_pages, rel=0.01)


@pytest.mark.usefixtures("card")
def test_weights_may_be_fp8_too(model: str) -> None:
    found = loaded(model, dtype="fp8")
    assert any(isinstance(module, Fp8Linear) for module in found.module.modules())
    golden = Golden([[5, 9, 20, 7, 7, 1], [7]], 2, PAGE_SIZE)
    engine = GpuEngine(found, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=PAGE_SIZE)
    assert all(keys.dtype == torch.float8_e4m3fn for keys in engine.pages.keys.values())
    assert len(golden.run(engine, FromFront(), 64)) == 2


@pytest.mark.usefixtures("card")
def test_pages_are_filled_with_normal_numbers_for_timing(model: str) -> None:
    engine = GpuEngine(loaded(model), TritonAttention(DEVICE), num_pages=20, page_size=PAGE_SIZE)
    torch.manual_seed(0)
    engine.pages.fill()
    keys = engine.pages.keys[0].float()
    assert abs(float(keys.mean())) < 0.1
    assert 0.9 < float(keys.std()) < 1.1
