"""Tiny random models of the families in `tests.support.families`, and a tokenizer for them.

`tiny_model(family)` is the transformers model itself, the truth that tests compare with;
`tiny_model_folder(folder, family)` saves it with a tokenizer, as users have it. Both are seeded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from llmbatch.engine.model.refusals import find_class
from tests.support.families import BOS, TABLE
from tests.support.families import EOS as EOS
from tests.support.families import PAD as PAD

# The families whose modules are fused in full, which most tests of the engine run.
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
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE


def tiny_config(family: str) -> PretrainedConfig:
    """The config of a family's tiny model."""
    return TABLE[family].config()


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int | None = None
) -> PreTrainedModel:
    """A family's tiny model with random weights, norms and biases included; `dtype` rounds them.

    Of its layers the first `layers`, where they are given.
    """
    torch.manual_seed(seed + TABLE[family].seed)
    config = tiny_config(family)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
    untyped: Any = find_class(family, config)
    # What transformers 5.17 takes by itself leaves out a cap of scores.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model: PreTrainedModel = untyped.from_config(config, dtype=torch.float32, **capped)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                scales = ("norm" in name or "ln_" in name) and not name.endswith("bias")
                offset = 1.0 if scales and not TABLE[family].norms_add_one else 0.0
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
    layers: int | None = None,
) -> str:
    """Save a family's tiny model and its tokenizer in `folder`, and return it."""
    model = tiny_model(family, seed=seed, dtype=dtype, layers=layers)
    return save_with_tokenizer(model, folder, chat_template=chat_template, bos=bos)


def save_with_tokenizer(
    model: PreTrainedModel, folder: Path | str, *, chat_template: str | None = None, bos: bool = False
) -> str:
    """Save a model and the tokenizer of tiny ones in `folder`, and return it."""
    model.save_pretrained(folder)
    tiny_tokenizer(chat_template=chat_template, bos=bos).save_pretrained(folder)
    return str(folder)


def chat_model_folder(folder: Path) -> str:
    """Save a tiny model with a chat template and a context of 4096 tokens in `folder`, and return it."""
    tiny_model_folder(folder, "llama", chat_template=CHAT_TEMPLATE)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    return str(folder)


def of_all_experts(folder: str) -> str:
    """Send each token to all experts, so that rounding changes no choice, and round matrices to 16 points; in place."""
    config, file = Path(folder) / "config.json", Path(folder) / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_experts_per_tok": 4}))
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.ndim > 1 and not any(part in name for part in ("embed", "lm_head", "gate.", "router", "bias")):
            scale = weight.abs().max() / 8
            weights[name] = (weight / scale).round().clamp(-8, 7) * scale.half().float()
    save_file(weights, file, metadata={"format": "pt"})
    return folder
