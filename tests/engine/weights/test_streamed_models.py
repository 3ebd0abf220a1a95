"""A model whose weights come from a file says what it says with all of them in memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.mixture.experts import Experts
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import DType
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.errors import ModelError
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from llmbatch.perf_model.residency import BUFFERS
from tests.support.models import tiny_model, tiny_model_folder

TOKENS = 12


def logits(loaded: LoadedModel) -> torch.Tensor:
    """What a model says after a few tokens, asked twice: buffers have held other weights by then."""
    step = CpuOps().probe_step(loaded.attention, loaded.dtype, TOKENS)
    ids, positions = torch.arange(5, 5 + TOKENS)[None], torch.arange(TOKENS)[None]
    with torch.inference_mode():
        first, second = (
            loaded.module(input_ids=ids, position_ids=positions, use_cache=False, llmbatch=step).logits.clone()
            for _ in range(2)
        )
    assert torch.equal(first, second)
    assert isinstance(first, torch.Tensor)
    return first


def truth(family: str) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = tiny_model(family)(torch.arange(5, 5 + TOKENS)[None]).logits
    return found


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt_oss"])
def test_streamed_weights_give_the_logits_of_resident_ones(tmp_path: Path, family: str) -> None:
    folder = tiny_model_folder(tmp_path / "model", family)
    resident = load_model(folder, dtype="float32", platform=HOST)
    streamed = load_model(folder, dtype="float32", weights_memory=1, platform=HOST)
    assert resident.streamed is None
    assert streamed.streamed is not None
    assert torch.equal(logits(streamed), logits(resident))
    assert torch.allclose(logits(resident), truth(family), atol=1e-4)


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_streamed_integers_give_the_logits_of_resident_ones(tmp_path: Path, family: str, dtype: DType) -> None:
    folder = tiny_model_folder(tmp_path / "model", family)
    resident = load_model(folder, dtype=dtype, platform=HOST)
    streamed = load_model(folder, dtype=dtype, weights_memory=1, platform=HOST)
    assert streamed.streamed is not None
    assert torch.equal(logits(streamed), logits(resident))


def in_panels(weight: torch.Tensor) -> int:
    """Count the bytes of a weight [..., columns, width] that is packed."""
    columns = weight.shape[-2]
    return weight.nbytes // columns * (-(-columns // COLUMNS) * COLUMNS)


def test_what_stays_beside_experts_is_counted_with_joined_projections(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    folder = tiny_model_folder(tmp_path / "model", "mixtral")
    streamed = load_model(folder, dtype="float32", weights_memory=1, platform=HOST).streamed
    assert streamed is not None
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}  # no norms: few bytes
    experts = sum(in_panels(weight) for name, weight in matrices.items() if ".experts." in name)
    around = sum(weight.nbytes for name, weight in matrices.items() if ".experts." not in name)
    assert streamed.streamed_bytes == experts
    blocks = model.config.num_hidden_layers * model.config.num_local_experts
    assert streamed.kept_bytes == around + BUFFERS * experts // blocks


def test_shards_of_an_earlier_download_are_left_alone(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "llama")
    resident = load_model(folder, dtype="float32", platform=HOST)
    whole = load_file(f"{folder}/model.safetensors")
    stale = {name: 0.5 * tensor for name, tensor in whole.items()}
    save_file(stale, f"{folder}/model-00001-of-00001.safetensors", metadata={"format": "pt"})
    streamed = load_model(folder, dtype="float32", weights_memory=1, platform=HOST)
    assert torch.equal(logits(streamed), logits(resident))


def test_weights_of_another_type_are_converted_on_their_way(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "llama", dtype=torch.bfloat16)
    resident = load_model(folder, dtype="float32", platform=HOST)
    streamed = load_model(folder, dtype="float32", weights_memory=1, platform=HOST)
    assert torch.equal(logits(streamed), logits(resident))


def test_experts_that_no_token_is_sent_to_are_not_read(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "mixtral")
    streamed = load_model(folder, dtype="float32", weights_memory=1, platform=HOST)
    experts = next(module for module in streamed.module.modules() if isinstance(module, Experts))
    taken: list[int] = []

    class Stream:
        def take(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
            taken.append(block)
            return np.zeros(1 << 20, np.uint8)

        def expect(self, blocks: list[int], *, onward: bool) -> None:
            assert blocks == [2]
            assert not onward

    experts.stream = Stream()  # type: ignore[assignment]
    hidden = torch.ones(3, experts._width)
    experts(hidden, torch.full((3, 1), 2), torch.ones(3, 1))
    assert taken == [2]


def test_a_model_without_layers_of_one_form_must_stay_in_memory(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "gpt2")
    message = (
        "the weights must all stay in memory, since the model's layers have no form that one loop can run: take "
        "weights='resident' (--weights resident)"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(folder, dtype="float32", weights_memory=1, platform=HOST)


def test_random_weights_must_stay_in_memory(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=r"since they are random: take weights='resident' \(--weights resident\)$"):
        load_model(folder, dtype="float32", load_format="dummy", weights_memory=1, platform=HOST)
