"""Weights that are quantised in their files are read as the floats that they stand for, one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import config
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.quantised import dequantise
from llmbatch.engine.model.quantised.dequantise import QuantisedWeight
from llmbatch.engine.model.quantised.quantisation import read_quantisation
from llmbatch.errors import ModelError
from llmbatch.scheduler.admission_order import FromFront
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model_folder
from tests.support.quantised import LAYOUTS, Layout, quantise_folder, tensors

untyped: Any = AutoModelForCausalLM
config_of: Any = LlamaConfig  # takes other fields, too
LAYOUT = {layout.name: layout for layout in LAYOUTS}
ROWS = [[5, 9, 200, 7, 7, 1], [5, 9, 200, 31], [77]]
MAX_TOKENS = 8


def answers(folder: str) -> list[list[int]]:
    """The greedy answers of llmbatch."""
    golden = Golden(ROWS, MAX_TOKENS, 16)
    loaded = load_model(folder, dtype="float32", platform=HOST)
    engine = CpuEngine(loaded, num_pages=golden.num_pages, page_size=16)
    return golden.run(engine, FromFront(), 64)


def as_generated(folder: str) -> list[list[int]]:
    """What transformers says of the same rows."""
    model = untyped.from_pretrained(folder, dtype=torch.float32).eval()
    return generate(model, ROWS, [MAX_TOKENS] * len(ROWS), [EOS], PAD)


def read(layout: Layout, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A weight of these parts, as it is read."""
    quantisation = read_quantisation("folder", config_of(quantization_config=layout.config))
    assert quantisation is not None
    return QuantisedWeight("layer.weight", parts, quantisation, dtype)[...]


def changed(folder: Path, layout: Layout, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """A quantised model whose files are changed."""
    quantised, _ = quantise_folder(tiny_model_folder(folder / "model", "llama"), folder, layout)
    weights = load_file(f"{quantised}/model.safetensors")
    change(weights)
    save_file(weights, f"{quantised}/model.safetensors", {"format": "pt"})
    return quantised


def refusal(folder: str) -> str:
    """What is said of a model that cannot be loaded."""
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", platform=HOST)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_quantised_weights_give_the_answers_of_the_floats_that_they_stand_for(tmp_path: Path, layout: Layout) -> None:
    quantised, floats = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, layout)
    assert answers(quantised) == as_generated(floats)


@pytest.mark.parametrize("layout", ["packed, groups", "AWQ", "GPTQ, shuffled groups"])
def test_experts_that_are_quantised_one_by_one_are_joined(tmp_path: Path, layout: str) -> None:
    quantised, floats = quantise_folder(tiny_model_folder(tmp_path / "model", "qwen3_moe"), tmp_path, LAYOUT[layout])
    assert answers(quantised) == as_generated(floats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "rows", "width"),
    [
        ("packed, groups", 7, 37),
        ("packed, groups", 33, 64),
        ("packed, channels", 5, 13),
        ("packed, one scale", 3, 9),
        ("packed, shuffled groups", 9, 41),
        ("integers, groups", 11, 70),
        ("AWQ", 24, 21),
        ("GPTQ of 4 bits", 8, 40),
        ("GPTQ of 8 bits", 12, 36),
        ("GPTQ, shuffled groups", 16, 72),
    ],
)
def test_weights_of_odd_sizes_are_read_to_the_bit(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    layout = LAYOUT[name]
    numbers = layout.numbers(np.random.default_rng(1), rows, width)
    got = read(layout, tensors(layout.write(numbers)), dtype)
    assert got.dtype == dtype
    assert torch.equal(got, numbers.floats.to(dtype))


@pytest.mark.parametrize("name", ["packed, groups", "GPTQ, shuffled groups", "AWQ"])
def test_large_weights_are_computed_some_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUT[name]
    numbers = layout.numbers(np.random.default_rng(1), 48, 40)
    monkeypatch.setattr(dequantise, "_ELEMENTS", 700)  # 16 rows
    sizes: list[int] = []
    unpack = dequantise.unpack_words

    def counted(words: torch.Tensor, bits: int, width: int) -> torch.Tensor:
        numbers = unpack(words, bits, width)
        sizes.append(numbers.numel())
        return numbers

    monkeypatch.setattr(dequantise, "unpack_words", counted)
    assert torch.equal(read(layout, tensors(layout.write(numbers)), torch.float32), numbers.floats)
    assert sorted(sizes)[-3:] == [16 * 40] * 3


def test_the_user_is_told_what_the_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "type_here", lambda asked: (asked, ()))  # whatever this processor has
    quantised, _ = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, LAYOUT["AWQ"])
    assert load_model(quantised, dtype="bfloat16", platform=HOST).notes == (
        "weights are AWQ (4 bits) in their files and bfloat16 in memory, where they take about 4 times the room.",
    )


def test_a_config_of_a_text_part_or_of_old_files_is_read_too(tmp_path: Path) -> None:
    quantised, floats = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, LAYOUTS[0])
    config = json.loads(Path(quantised, "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    Path(quantised, "config.json").write_text(json.dumps(config))
    assert answers(quantised) == as_generated(floats)


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    quantised, floats = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, LAYOUTS[0])
    weights = load_file(f"{quantised}/model.safetensors")
    Path(quantised, "model.safetensors").unlink()
    Path(quantised, "consolidated.safetensors").write_bytes(b"another copy, in another form")
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    named = {name: files[i % 2] for i, name in enumerate(sorted(weights))}  # parts of a weight lie in both
    for file in files:
        save_file({name: one for name, one in weights.items() if named[name] == file}, f"{quantised}/{file}")
    Path(quantised, "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert answers(quantised) == as_generated(floats)


def test_a_weight_without_all_its_parts_is_an_error(tmp_path: Path) -> None:
    folder = changed(tmp_path, LAYOUTS[0], lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight_scale"))
    assert refusal(folder) == (
        "quantised weight model.layers.1.mlp.up_proj.weight cannot be read (its files lack "
        "model.layers.1.mlp.up_proj.weight_scale): copy or download them again"
    )


def test_parts_that_do_not_go_together_are_an_error(tmp_path: Path) -> None:
    def cut(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.scales"
        weights[name] = weights[name][:, :-8].clone()

    assert refusal(changed(tmp_path, LAYOUT["AWQ"], cut)) == (
        "quantised weight model.layers.1.mlp.up_proj.weight cannot be read (as AWQ (4 bits) of qweight [48, 10], "
        "qzeros [3, 10], scales [3, 72]): correct quantization_config in its config.json, or copy or download its "
        "file again"
    )


def test_groups_of_another_size_than_the_config_says_are_an_error(tmp_path: Path) -> None:
    layout = replace(LAYOUT["AWQ"], config={**LAYOUT["AWQ"].config, "group_size": 64})
    folder = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, layout)[0]
    assert "cannot be read (as AWQ (4 bits) of qweight [80, 6], qzeros [5, 6], scales [5, 48])" in refusal(folder)


def test_files_of_floats_with_a_config_of_quantised_ones_are_an_error(tmp_path: Path) -> None:
    quantised, floats = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, LAYOUT["AWQ"])
    Path(quantised, "model.safetensors").write_bytes(Path(floats, "model.safetensors").read_bytes())
    assert refusal(quantised) == (
        f"the weights in model folder {quantised!r} must be AWQ (4 bits), as its config says, and none is: "
        "remove quantization_config from its config.json if they are float"
    )


def test_a_weight_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    folder = changed(tmp_path, LAYOUT["AWQ"], lambda weights: weights.pop("model.norm.weight"))
    assert refusal(folder) == (
        f"model folder {folder!r} cannot be loaded (its weights of AWQ (4 bits) lack model.norm.weight): "
        "complete it, or take the files of the same model that are not quantised"
    )


def test_quantised_weights_must_be_safetensors(tmp_path: Path) -> None:
    folder = quantise_folder(tiny_model_folder(tmp_path / "model", "llama"), tmp_path, LAYOUT["AWQ"])[0]
    torch.save(load_file(f"{folder}/model.safetensors"), f"{folder}/pytorch_model.bin")
    Path(folder, "model.safetensors").unlink()
    assert refusal(folder) == (
        f"quantised weights in model folder {folder!r} must be .safetensors files, got pytorch_model.bin: "
        "take the files of the same model that are not quantised"
    )
