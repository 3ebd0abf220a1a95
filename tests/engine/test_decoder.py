"""On the processor the layers of common models run in one compiled call; other models' stay modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llmbatch.engine.cpu import linear
from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.decoder import Decoder
from llmbatch.engine.cpu.joined_layers import join_layers
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import number_type
from llmbatch.engine.model.config import DType, describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import shape_of
from llmbatch.kernels.cpu.tiles import vector_ir
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from tests.support.families import TABLE
from tests.support.logits import logits
from tests.support.models import tiny_model_folder

# Families of which each has another form of layer, or other parts.
JOINED = (
    "exaone4", "gemma", "gemma2", "gemma3", "granite", "llama", "mistral", "olmo2", "phi3", "phi3_long", "qwen2",
    "qwen3", "smollm3",
)  # fmt: skip  # a list of names
PLAIN = [
    ("llama", True), ("qwen3", True), ("phi3", True), ("smollm3", True), ("olmo2", True), ("gemma2", False),
    ("gemma3", False),
]  # fmt: skip  # a list of names
ROUNDED = tuple(name for name in JOINED if name != "phi3_long")  # its rope makes modules of bfloat16 .03 off, too
UNPACKED = replace(HOST, pack=None)


def unpacked(folder: Path, family: str = "llama") -> LoadedModel:
    """A model whose modules are fused, and its layers not yet joined."""
    return load_model(tiny_model_folder(folder, family), dtype="float32", platform=UNPACKED)


def with_weights_of_four_bits(folder: str) -> str:
    """Round the matrices of a model to 16 points, in place."""
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 8
            weights[name] = (weight / scale).round().clamp(-8, 7) * scale.half().float()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", JOINED)
def test_joined_layers_give_the_logits_of_separate_ones(tmp_path: Path, family: str) -> None:
    loaded = unpacked(tmp_path, family)
    expected = logits(loaded)
    assert join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "plain"), PLAIN)
def test_models_that_do_nothing_else_around_their_layers_lose_their_forward(
    tmp_path: Path, family: str, plain: bool
) -> None:
    """Gemma 2 caps its logits, and Gemma 3 rotates kinds of layers in different ways."""
    loaded = unpacked(tmp_path, family)
    theirs = type(loaded.module).forward
    assert join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    assert (getattr(loaded.module.forward, "__func__", None) is not theirs) == plain


@pytest.mark.parametrize("family", TABLE)
def test_one_loop_runs_the_layers_of_a_family_if_its_page_says_so(tmp_path: Path, family: str) -> None:
    loaded = unpacked(tmp_path, family)
    joined = join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    assert (joined is not None) == TABLE[family].one_loop


def test_layers_that_stay_are_told_of(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "gpt_oss"), dtype="float32", platform=HOST)
    assert loaded.notes == ("layers run module by module, which takes longer: they have no form that one loop can run",)


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1"])
def test_layers_stay_where_what_one_returns_is_read_beside_the_next(tmp_path: Path, name: str) -> None:
    """As by a model that adds its embeddings, or a layer's output, to what the last layer returns."""
    loaded = unpacked(tmp_path)
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        kept.append(out)

    def add(module: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        return given[0] + kept.pop()

    loaded.module.get_submodule(name).register_forward_hook(keep)
    loaded.module.get_submodule("model.norm").register_forward_pre_hook(add)
    joined = join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    assert (joined is not None) == (name == "model.embed_tokens")  # which the joined layers leave as they are


@pytest.mark.parametrize("family", ROUNDED)
def test_joined_layers_give_much_the_same_by_either_kind_of_rows(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_folder(tmp_path, family)
    found = []
    for rows in (np.uint16, np.uint32):
        monkeypatch.setattr(linear, "bfloat16_rows", lambda rows=rows: np.dtype(rows))
        found.append(logits(load_model(folder, dtype="bfloat16", platform=HOST)))
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
@pytest.mark.parametrize("family", ROUNDED)
def test_joined_layers_may_be_int8(tmp_path: Path, family: str) -> None:
    folder = tiny_model_folder(tmp_path, family)
    expected = logits(load_model(folder, dtype="bfloat16", platform=HOST))
    loaded = load_model(folder, dtype="int8", platform=HOST)
    assert loaded.notes == ()
    got = logits(loaded)
    assert not torch.equal(got, expected)
    assert (got - expected).norm() < 0.1 * expected.norm()


@pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
@pytest.mark.parametrize("family", ROUNDED)
def test_joined_layers_may_be_int4(tmp_path: Path, family: str) -> None:
    """Weights of four bits lose nothing but what the rounding of rows costs, as in int8."""
    folder = with_weights_of_four_bits(tiny_model_folder(tmp_path, family))
    expected = logits(load_model(folder, dtype="bfloat16", platform=HOST))
    loaded = load_model(folder, dtype="int4", platform=HOST)
    assert loaded.notes == ()
    got = logits(loaded)
    assert not torch.equal(got, expected)
    assert (got - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("taken", ["bfloat16", "float32"])
def test_a_processor_without_int8_says_what_it_takes_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: DType
) -> None:
    monkeypatch.setattr(vector_ir, "HAS_INT8", False)
    monkeypatch.setattr(number_type, "fastest_type", lambda: taken)
    folder = tiny_model_folder(tmp_path, "llama")
    described = describe_model(folder, dtype="int8")
    assert described.layer_type is None
    assert shape_of(described).weight_bytes == shape_of(describe_model(folder, dtype=taken)).weight_bytes
    loaded = load_model(folder, dtype="int8", platform=HOST)
    assert loaded.notes == (f"this processor cannot multiply int8 (it has no avx512_vnni): {taken} is taken instead",)
    assert torch.equal(logits(loaded), logits(load_model(folder, dtype=taken, platform=HOST)))


def test_a_processor_without_bfloat16_says_so_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_ir, "HAS_BFLOAT16", False)
    folder = tiny_model_folder(tmp_path, "llama")
    said = ("this processor cannot multiply bfloat16 (it has no avx512_bf16): float32 may be faster",)
    assert describe_model(folder, dtype="bfloat16").notes == said
    assert describe_model(folder, dtype="float32").notes == ()


def test_the_number_of_workers_changes_no_bit(tmp_path: Path) -> None:
    loaded = unpacked(tmp_path)
    assert join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    threads = numba.get_num_threads()
    found = []
    for workers in range(1, 1 + min(2, numba.config.NUMBA_NUM_THREADS)):  # type: ignore[attr-defined]
        numba.set_num_threads(workers)
        found.append(logits(loaded, 16))
    numba.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


def test_activations_are_made_anew_only_where_a_step_is_twice_as_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the memory of the step before would lie between others, too small for the next one, again and again."""
    made: list[int] = []
    make = Decoder._make_buffers

    def note(decoder: Decoder, tokens: int) -> Any:
        made.append(tokens)
        return make(decoder, tokens)

    loaded = unpacked(tmp_path)
    assert join_layers(loaded.module, loaded.attention, loaded.dtype, CpuOps())
    monkeypatch.setattr(Decoder, "_make_buffers", note)
    for tokens in range(1, 17):
        logits(loaded, tokens)
    assert made == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("rows", [[], [6], [2, 5, 5], [6, 0]])
def test_rows_that_are_asked_for_alone_are_the_same_to_the_bit(tmp_path: Path, family: str, rows: list[int]) -> None:
    """The last layer is computed for these rows only, behind the keys and values of all."""
    loaded = load_model(tiny_model_folder(tmp_path, family), dtype="float32", platform=HOST)
    ids, step = torch.arange(5, 12)[None], CpuOps().probe_step(loaded.attention, loaded.dtype, 7)
    with torch.inference_mode():
        got = loaded.module(
            input_ids=ids,
            position_ids=torch.arange(7)[None],
            use_cache=False,
            llmbatch=step,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64),
        ).logits
    assert torch.equal(got, logits(loaded)[:, rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_from_ids_to_logits_gives_what_the_models_class_gives(tmp_path: Path, dtype: DType) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama"), dtype=dtype, platform=HOST)
    found = logits(loaded).clone()
    del vars(loaded.module)["forward"]
    expected = logits(loaded).float()
    assert (found - expected).norm() < (1e-5 if dtype == "float32" else 2e-2) * expected.norm()


def test_tokens_that_have_no_embedding_are_refused(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama"), dtype="float32", platform=HOST)
    step = CpuOps().probe_step(loaded.attention, loaded.dtype, 2)
    ids = torch.tensor([[1, loaded.config.vocab_size]])
    with pytest.raises(IndexError, match=rf"tokens must be below {ids[0, 1]}, got {ids[0, 1]}"):
        loaded.module(input_ids=ids, position_ids=torch.arange(2)[None], use_cache=False, llmbatch=step)


def test_angles_are_those_of_positions_however_far_steps_were_before(tmp_path: Path) -> None:
    loaded = load_model(tiny_model_folder(tmp_path, "llama"), dtype="float32", platform=HOST)
    before = logits(loaded, 3).clone()
    logits(loaded, 16)
    assert torch.equal(logits(loaded, 3), before)
