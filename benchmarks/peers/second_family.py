"""A model of a second family with random weights: the shape of Qwen2.5-0.5B, the vocabulary of SmolLM2.

    python benchmarks/peers/second_family.py FOLDER

Weights have a fixed seed. Text is split as for Qwen2, because transformers goes by the family, so prompts have some 1 %
fewer tokens than with SmolLM2. Only tokens of the vocabulary are ever generated: the embeddings of all others, which
are also the last layer's weights, are zero, so the largest logit is never theirs. Answers mean nothing, and they do not
end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SEED = 20261123
CONTEXT = 8192  # the tokenizer's model's; the published model has 32768


def write(folder: Path) -> None:
    """Write weights, config and tokenizer into a folder."""
    import torch
    from rounds import demo_model
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from llmbatch.engine.model.checkpoints import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(demo_model()))
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(SEED)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[len(tokenizer) :] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a model of a second family with random weights.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
