"""Dummy models that are really on the disk: a dense one and one of experts, with a small vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tests.support.models import tiny_tokenizer

_VOCABULARY: Final = 512
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": _VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 1e4, "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": 256, "eos_token_id": 257,
    "attention_bias": False,
}  # fmt: skip  # a table
DENSE: Final[dict[str, Any]] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1536,
    "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 12, "num_key_value_heads": 3,
    "head_dim": 128,
}  # fmt: skip  # a table
EXPERTS: Final[dict[str, Any]] = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024,
    "intermediate_size": 704, "moe_intermediate_size": 704, "num_hidden_layers": 14, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip  # a table


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model of random weights, a file a layer, unless it is there; returns its folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    hidden = config["hidden_size"]
    ends = {
        "model.embed_tokens.weight": torch.randn(_VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(_VOCABULARY, hidden) / hidden**0.5,
    }
    places: dict[str, str] = {}
    parts = [ends, *({} for _ in range(config["num_hidden_layers"]))]
    for number, tensors in enumerate(parts):
        filled = tensors or dict(_layer(number - 1, config))
        file = f"model-{number:05}.safetensors"
        save_file(filled, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(filled, file)
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _layer(number: int, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    name = f"model.layers.{number}"
    for part, rows, columns in (
        ("q_proj", heads, hidden), ("k_proj", shared, hidden), ("v_proj", shared, hidden), ("o_proj", hidden, heads)
    ):  # fmt: skip  # a table
        yield f"{name}.self_attn.{part}.weight", _random(rows, columns)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.{norm}.weight", torch.ones(hidden)
    if config["model_type"] == "llama":
        yield from _mlp(f"{name}.mlp", hidden, config["intermediate_size"])
        return
    for norm in ("q_norm", "k_norm"):
        yield f"{name}.self_attn.{norm}.weight", torch.ones(width)
    yield f"{name}.mlp.gate.weight", _random(config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
    for part, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        yield f"{name}.{part}.weight", _random(rows, columns)


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(columns**-0.5)
