"""What a loaded model takes of its device besides its weights, found by running a step as large as any will be."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from llmbatch.engines import Step
from llmbatch.engines.accelerated import AcceleratedEngine
from llmbatch.engines.loading import LoadedModel
from llmbatch.errors import JobError
from llmbatch.kernels.backends import PagedAttention
from llmbatch.requests import Requests
from llmbatch.sampling import SamplingParams

_KEPT: Final = 0.03  # of what is free: for blocks that the allocator cannot use whole


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take of a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def pool_bytes(loaded: LoadedModel, attention: PagedAttention, *, tokens: int, rows: int, page_size: int) -> int:
    """Bytes that pages may take once steps of so many tokens, of so many sampled rows, have what they need.

    Raises JobError where not even such a step fits.
    """
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    pages = run_largest(loaded, attention, tokens=tokens, rows=rows, page_size=page_size)
    peak = torch.cuda.max_memory_allocated(loaded.device) - before - pages
    torch.cuda.empty_cache()
    free = free_memory(loaded.device)
    left = int((1.0 - _KEPT) * free) - peak
    if left <= 0:
        raise JobError(
            f"memory runs out on {loaded.device}: a step of {tokens:,} tokens takes {peak:,} bytes, and {free:,} are "
            "free beside the weights: lower step_tokens (--step-tokens) or max_running (--max-running), or take a "
            "smaller model"
        )
    return left


def run_largest(loaded: LoadedModel, attention: PagedAttention, *, tokens: int, rows: int, page_size: int) -> int:
    """Run a step of so many tokens, of as many sequences as are sampled at once; the bytes of its pages.

    Its tokens are drawn with a top_p, which takes most.
    """
    rows = min(rows, tokens)
    counts = np.full(rows, tokens // rows, np.int32)
    each = -(-int(counts[0]) // page_size)
    zeros = np.zeros(rows, np.int32)
    requests = Requests(
        tokens=np.zeros(int(counts.sum()), np.int32),
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        max_tokens=zeros + 2,
        params_index=zeros,
        params=(SamplingParams(max_tokens=2, temperature=1.0, top_p=0.5),),
        serial=np.arange(rows, dtype=np.uint64),
        recorded=zeros + 2,
    )
    engine = AcceleratedEngine(loaded, attention, num_pages=rows * each, page_size=page_size)
    engine.begin(requests)
    engine.execute(
        Step(
            index=0,
            num_decodes=0,
            slots=np.arange(rows, dtype=np.int32),
            requests=np.arange(rows, dtype=np.int32),
            starts=zeros,
            counts=counts,
            samples=np.ones(rows, np.bool_),
            block_tables=np.arange(rows * each, dtype=np.int32).reshape(rows, each),
        )
    )
    return engine.page_bytes
