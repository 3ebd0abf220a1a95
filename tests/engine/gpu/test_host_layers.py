"""A device whose layers come from its host gives the answers of `generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.weights.host_layers import CopyStream, PlainCopies
from llmbatch.errors import ModelError
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.scheduler.admission_order import Blend
from tests.engine.gpu.test_engine import DEVICE, prompts
from tests.engine.gpu.test_engine import PLATFORM as RESIDENT
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

PLATFORM = replace(RESIDENT, copies=CopyStream if DEVICE.type == "cuda" else lambda _: PlainCopies())
LAYERS = 3
MAX_TOKENS = 3


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_answers_are_those_of_generate(tmp_path: Path, name: str) -> None:
    folder = tiny_model_folder(tmp_path, name, layers=LAYERS)
    rows = prompts()[:3]
    expected = generate(tiny_model(name, layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded = load_model(folder, dtype="float32", weights_memory=1, platform=PLATFORM)
    assert loaded.streamed is not None
    golden = Golden(rows, MAX_TOKENS, page_size=4, spare_pages=3)
    engine = GpuEngine(loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, page_size=4)
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    assert golden.cached > 0


def test_attention_with_sinks_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "gpt_oss", layers=1)
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", weights_memory=1, platform=PLATFORM)
    assert str(caught.value) == (
        f"model {folder!r} uses attention with sinks, which is not supported: with layers that come from the host's "
        "memory it is known beforehand; take a larger GPU, or --device cpu"
    )


def test_weights_that_the_host_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.engine.model.by_layer.available_memory", lambda: 1000)
    folder = tiny_model_folder(tmp_path, "llama", layers=1)
    with pytest.raises(ModelError, match=r"must fit in the host's memory, [0-9,]+ bytes, got 930 free: take a"):
        load_model(folder, dtype="float32", weights_memory=1, platform=PLATFORM)
