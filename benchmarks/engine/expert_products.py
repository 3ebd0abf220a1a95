"""Times steps of small random mixtures on this processor: by the type of weights, and packed experts beside modules.

    python benchmarks/engine/expert_products.py [--rounds N]

Steps are one sequence's: prompts of so many tokens, of which the fewest are as many as decodes. Forms alternate, and
figures are the medians of the rounds. int8 and int4 are left out where the processor does not multiply them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from llmbatch.choices import DType
from llmbatch.engine.cpu.linear import pack_linears
from llmbatch.engine.cpu.platform import HOST, OPS
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.platform import Packed, Platform
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "num_experts_per_tok": 2, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip  # a table
_TOKENS: Final = (8, 64, 512)


def _leave_experts(
    model: nn.Module, specs: Any, dtype: torch.dtype, *, layer_bits: int | None, streaming: Any
) -> Packed:
    """Pack the linear layers of a model alone."""
    pack_linears(model, dtype, layer_bits=layer_bits)
    return Packed(())


def _load(config: PretrainedConfig, name: str, dtype: DType, platform: Platform) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [name]
        config.save_pretrained(folder)
        return load_model(str(Path(folder)), dtype=dtype, load_format="dummy", platform=platform)


def _seconds(loaded: LoadedModel, tokens: int) -> float:
    """Time a step of so many tokens."""
    step = OPS.probe_step(loaded.attention, loaded.dtype, tokens)
    ids, positions = torch.arange(tokens)[None] % 500, torch.arange(tokens)[None]
    begun = time.perf_counter()
    with torch.inference_mode():
        loaded.module(input_ids=ids, position_ids=positions, use_cache=False, llmbatch=step)
    return time.perf_counter() - begun


def _compare(title: str, forms: dict[str, LoadedModel], rounds: int) -> None:
    """Print the tokens a second of each form, and its ratio to the first."""
    print(f"\n{title}, tokens/s\n\n| tokens a step | " + " | ".join(forms) + " | over the first |")
    print("| --- |" + " --- |" * (len(forms) + 1))
    for tokens in _TOKENS:
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(1 + rounds):
            for name, loaded in forms.items():
                times[name].append(_seconds(loaded, tokens))
        rates = [tokens / statistics.median(found[1:]) for found in times.values()]
        ratios = ", ".join(f"{rate / rates[0]:.2f}" for rate in rates[1:])
        print(f"| {tokens} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + f" | {ratios} |")


def main() -> None:
    """Compare, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    types: tuple[DType, ...] = ("bfloat16", "int8", "int4") if HAS_INT8 else ("bfloat16",)
    plain = Qwen3MoeConfig(**_SIZES, num_experts=16, intermediate_size=1024, moe_intermediate_size=1024)
    forms = {str(dtype): _load(plain, "Qwen3MoeForCausalLM", dtype, HOST) for dtype in types}
    _compare("16 experts of 512 x 1,024, two a token, 8 layers", forms, rounds)
    clamped = GptOssConfig(**_SIZES, num_local_experts=16, intermediate_size=1024)
    for dtype in ("bfloat16", "float32"):
        apart = replace(HOST, pack=_leave_experts)
        sides = {"modules": apart, "packed": HOST}
        forms = {side: _load(clamped, "GptOssForCausalLM", dtype, platform) for side, platform in sides.items()}
        _compare(f"The same by gpt-oss, {dtype}", forms, rounds)


if __name__ == "__main__":
    main()
