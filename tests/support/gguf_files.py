"""Tiny GGUF files with random weights, of the architectures that transformers reads.

Metadata are written under the names that transformers reads a config by, and tensors under those that it maps weights
by, in the shapes that they have before it changes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

VOCABULARY: Final = 260
# What transformers calls an architecture, where a file calls it otherwise.
_NAMES: Final = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "minimax-m2": "minimax_m2",
    "gpt-oss": "gpt_oss",
}
_METADATA: Final[dict[str, Any]] = {
    "context_length": 128, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5, "attention.key_length": 8, "attention.sliding_window": 16,
    "rope.dimension_count": 8, "rope.freq_base": 10000.0, "expert_count": 4, "expert_used_count": 2,
    "vocab_size": VOCABULARY,
}  # fmt: skip  # a table


def write_gguf(
    gguf: Any,
    path: Path,
    architecture: str = "llama",
    *,
    element: str = "float32",
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    divisors: Any = None,
    more: dict[str, int] | None = None,
) -> None:
    """Write a model of two layers and a byte-level tokenizer.

    `element` is a type of numpy, or bfloat16: float32 whose numbers bfloat16 holds. `rope` are metadata of scaled rope,
    `divisors` the tensor of its frequencies, `more` metadata that differ from those of other models here.
    """
    described = path.with_suffix(".metadata")
    write_metadata(gguf, described, architecture, [] if tied else ["output.weight"])
    untyped: Any = AutoConfig
    untyped_model: Any = AutoModelForCausalLM
    config = untyped.from_pretrained(path.parent, gguf_file=described.name)
    described.unlink()
    with torch.device("meta"):
        model: PreTrainedModel = untyped_model.from_config(config)
    processing: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = processing(config=config.to_dict())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in get_gguf_hf_weights_map(model, processor).items():
        if tied and name == "output.weight":
            continue
        shape = _shape(architecture, name, tuple(model.state_dict()[weight].shape))
        suffix = ".weight" if name.endswith("_exps") else ""  # which no weight has that is all experts'
        tensors[name + suffix] = torch.randn(shape, generator=generator)
    numbers = {name: _numbers(tensor, element) for name, tensor in tensors.items()}
    if divisors is not None:
        numbers["rope_freqs.weight"] = divisors
    write_tensors(gguf, path, architecture, numbers, rope, more)


def write_metadata(
    gguf: Any,
    path: Path,
    architecture: str,
    tensors: list[str] | None = None,
    rope: dict[str, Any] | None = None,
    more: dict[str, int] | None = None,
) -> None:
    """Write a file of metadata, with a number in each of these tensors."""
    write_tensors(gguf, path, architecture, {name: np.zeros(1, np.float32) for name in tensors or ()}, rope, more)


def _numbers(tensor: torch.Tensor, element: str) -> Any:
    if element == "bfloat16":
        return tensor.bfloat16().float().numpy()
    return tensor.numpy().astype(element)


def _shape(architecture: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in a file, by that of the weight that it is a part of."""
    if architecture == "gpt2" and len(shape) == 2 and name.startswith("blk."):
        return shape[::-1]
    if "ffn_gate_exps" in name or "ffn_up_exps" in name:
        return shape[0], shape[1] // 2, shape[2]
    if "ffn_gate_inp_shexp" in name:
        return shape[1:]
    return shape


def write_tensors(
    gguf: Any,
    path: Path,
    architecture: str,
    tensors: dict[str, Any],
    rope: dict[str, Any] | None = None,
    more: dict[str, int] | None = None,
) -> None:
    """Write a file of metadata, `rope` among them as those of scaled rope, and these tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    known: Any = GGUF_CONFIG_MAPPING.get(_NAMES.get(architecture, architecture), {})
    for name, value in {**_METADATA, **(more or {})}.items():
        if name in known or name in (more or {}):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{name}", value)
    for name, value in (rope or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.rope.scaling.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
