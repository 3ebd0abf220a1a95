"""Tiny random models of every family that llmbatch runs, and a tokenizer for them.

`tiny_model(family)` is the transformers model itself, the truth that tests compare with;
`tiny_model_folder(folder, family)` saves it with a tokenizer, as users have it. Both are seeded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 260  # the 256 bytes, then <bos>, <eos>, <pad>, <sep>
BOS, EOS, PAD = 256, 257, 258
WINDOW = 12

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_oss")

# What `transformers` configs of every family take.
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip  # a table

CHAT_TEMPLATE = (
    "{% for message in messages %}<sep>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<sep>assistant: {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.3,  # far from 0, so that the likeliest token is likeliest by a margin
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def tiny_config(family: str) -> PretrainedConfig:
    """The config of a family's tiny model; windows of 12 tokens where the family has them."""
    if family == "llama":
        return LlamaConfig(**_COMMON, head_dim=8, tie_word_embeddings=True)
    if family == "qwen2":
        return Qwen2Config(**_COMMON)
    if family == "qwen3":
        return Qwen3Config(**_COMMON, head_dim=16)
    if family == "mistral":
        return MistralConfig(**_COMMON, head_dim=16, sliding_window=WINDOW)
    if family == "gemma":
        return GemmaConfig(**_COMMON, head_dim=16)
    if family == "gemma2":
        return Gemma2Config(
            **_COMMON, head_dim=16, sliding_window=WINDOW, layer_types=_LAYERS, query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0, final_logit_softcapping=20.0,
        )  # fmt: skip  # arguments in groups
    if family == "gemma3":
        return Gemma3TextConfig(
            **_COMMON, head_dim=16, sliding_window=WINDOW, layer_types=_LAYERS, query_pre_attn_scalar=16
        )
    if family == "gpt_oss":
        return GptOssConfig(
            **_COMMON, head_dim=16, sliding_window=WINDOW, layer_types=_LAYERS, num_local_experts=4,
            num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip  # arguments in groups
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A family's tiny model with random weights, norms and biases included; `dtype` rounds them."""
    torch.manual_seed(seed)
    untyped: Any = AutoModelForCausalLM
    model: PreTrainedModel = untyped.from_config(tiny_config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                offset = 1.0 if "norm" in name and not family.startswith("gemma") else 0.0
                weight.copy_(offset + 0.3 * torch.randn(weight.shape))
    nn.Module.to(model, dtype)
    nn.Module.eval(model)
    return model


def tiny_tokenizer(*, chat_template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte; `bos` puts <bos> before raw prompts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<bos>", "<eos>", "<pad>", "<sep>"])
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    untyped: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = untyped(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    return tokenizer


def tiny_model_folder(
    folder: Path | str,
    family: str,
    *,
    chat_template: str | None = None,
    bos: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Save a family's tiny model and its tokenizer in `folder`, and return it."""
    tiny_model(family, seed=seed, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer(chat_template=chat_template, bos=bos).save_pretrained(folder)
    return str(folder)
