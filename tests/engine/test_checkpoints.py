"""Where a model's files are found, and how GGUF files are converted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model import checkpoints
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.loader import load_model
from llmbatch.errors import ModelError
from llmbatch.system.cache import cache_folder
from tests.support.models import tiny_model_folder

untyped: Any = AutoModelForCausalLM


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    assert resolve_model(folder) == folder


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == (
        f"model folder {str(tmp_path)!r} holds neither config.json nor a .gguf file: name a folder that "
        "save_pretrained wrote"
    )


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path / "model.bin"))
    assert str(caught.value) == (
        f"model must be a folder, a .gguf file or a hub name, got the file {str(tmp_path / 'model.bin')!r}: "
        "name its folder"
    )


def test_a_gguf_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("junk.gguf")
    assert str(caught.value) == "model file 'junk.gguf' is not there: check its path"


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("./models/of/nobody")
    assert str(caught.value) == (
        "model must be a folder, a .gguf file or a name on the hub, got './models/of/nobody': check its spelling"
    )


def test_a_hub_name_without_a_network_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(model: str) -> list[str]:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(checkpoints, "_hub_files", no_network)
    with pytest.raises(ModelError) as caught:
        resolve_model("nobody/nothing-at-all")
    assert str(caught.value) == (
        "model 'nobody/nothing-at-all' is no folder here and cannot be fetched: Name or service not known: "
        "name a local folder, or try again with a network"
    )


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from huggingface_hub import HfApi

    never = threading.Event()
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: never.wait(30))
    monkeypatch.setattr(checkpoints, "_HUB_SECONDS", 0.01)
    with pytest.raises(ModelError, match="cannot be fetched: the hub did not answer in 0 seconds"):
        resolve_model("nobody/nothing-at-all")
    never.set()


def test_a_gguf_file_without_its_readers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == ("reading m.gguf needs the packages gguf and accelerate: pip install gguf accelerate")


def test_a_broken_gguf_file_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert list((cache_folder() / "gguf").iterdir()) == []


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path))
    assert Path(folder).parent == tmp_path / "cache" / "gguf"
    assert load_model(folder, dtype="float32", platform=HOST).eos_token_ids == (2,)
    assert AutoConfig.from_pretrained(folder).dtype == torch.float32
    monkeypatch.setattr(checkpoints, "start_beside", None)
    assert resolve_model(str(tmp_path / "tiny.gguf")) == folder


def test_a_gguf_file_with_tensors_of_another_type_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf", element="int8")
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == (
        f"GGUF file {str(tmp_path / 'tiny.gguf')!r} cannot be read: its tensors of type I8 are not supported: types "
        "are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, "
        "IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4; take another file of the same model"
    )


def test_every_type_that_is_listed_is_dequantised() -> None:
    gguf = pytest.importorskip("gguf")
    for name in checkpoints._GGUF_TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        block = np.zeros(size, {"F32": np.float32, "F16": np.float16}.get(name, np.uint8))[None]
        assert gguf.dequantize(block, kind).size in (elements, size)


def test_a_conversion_goes_on_where_its_job_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))
    write_gguf(gguf, tmp_path / "tiny.gguf")
    program = f"from llmbatch.engine.model.checkpoints import resolve_model; resolve_model({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as job:
        while not any((tmp_path / "cache").glob("gguf/.converting-*")):  # the other process works
            assert job.poll() is None
        job.kill()
    folder = resolve_model(str(tmp_path))  # waits for the same conversion
    names = [file.name for file in (tmp_path / "cache" / "gguf").iterdir()]
    assert names == [Path(folder).name]


def write_gguf(gguf: Any, path: Path, *, element: str = "float32") -> None:
    """A Llama of one layer, as GGUF, with a byte-level tokenizer."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = 32, 48, 260
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(vocabulary)
    from tokenizers import pre_tokenizers

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output": (vocabulary, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy().astype(element))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
