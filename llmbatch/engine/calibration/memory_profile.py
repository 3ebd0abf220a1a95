"""Device memory that a loaded model takes in addition to its weights, found by running the largest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from llmbatch.engine.base import StreamEngine
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.recorder import MOST_ROWS, GraphRecorder, release_cached, rows_of
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.errors import JobError
from llmbatch.kernels.interface import PagedAttention
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step

_KEPT: Final = 0.03  # of what is free: for blocks that the allocator cannot use whole


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take of a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class MemoryHeadroom(NamedTuple):
    """The memory that a model leaves of its device."""

    pool_bytes: int  # for pages
    unrecorded: str | None  # why small steps cannot be recorded; None where they can


def measure_room(
    loaded: LoadedModel,
    attention: PagedAttention,
    *,
    tokens: int,
    rows: int,
    mixed: Sequence[int] = (),
    page_size: int,
) -> MemoryHeadroom:
    """Measure what is left after the largest steps and recorded ones, for so many tokens and sampled rows.

    `mixed` are the tokens of recorded steps with chunks, in rising order.
    Raises JobError if not even such a step fits.
    """
    device = loaded.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        pages = run_largest(loaded, attention, tokens=tokens, rows=rows, page_size=page_size)
    except torch.OutOfMemoryError as error:
        raise _too_small(loaded, tokens, f"more than the {free_memory(device):,} bytes that are free") from error
    peak = torch.cuda.max_memory_allocated(device) - before - pages
    release_cached()
    free = free_memory(device)
    taken, unrecorded = _record(loaded, attention, rows=min(rows, MOST_ROWS), mixed=mixed, page_size=page_size)
    release_cached()
    left = int((1.0 - _KEPT) * free) - peak - taken
    if left <= 0:
        raise _too_small(loaded, tokens, f"{peak + taken:,} bytes, and {free:,} are free")
    return MemoryHeadroom(left, unrecorded)


def _too_small(loaded: LoadedModel, tokens: int, takes: str) -> JobError:
    streams = "" if loaded.streamed is None else ", or weights_memory (--weights-memory)"
    return JobError(
        f"memory runs out on {loaded.device}: a step of {tokens:,} tokens takes {takes} in addition to the weights: "
        f"lower step_tokens (--step-tokens) or max_running (--max-running){streams}, or take a smaller model"
    )


class _Untimed(GraphRecorder):
    """Times nothing, so that every recording is kept, and its memory seen."""

    def seconds(self, repeat: Callable[[], None]) -> float:
        """Say nothing."""
        return 0.0


def _record(
    loaded: LoadedModel, attention: PagedAttention, *, rows: int, mixed: Sequence[int], page_size: int
) -> tuple[int, str | None]:
    """Return the bytes of recorded steps of at most so many rows and of `mixed` ones, and why none can be recorded.

    The largest recordings take the memory that all of them use, each other one what the driver keeps of it.
    """
    if loaded.streamed is not None:
        return 0, "their layers come from the host's memory"
    engine = GpuEngine(loaded, attention, num_pages=1, page_size=page_size, recorder=_Untimed())
    others = {rows_of(count) for count in range(1, rows)} - {rows_of(rows)}
    try:
        taken = _taken(loaded.device, lambda: engine.record((rows,), mixed[-1:]))
        if others:
            taken += len(others) * _taken(loaded.device, lambda: engine.record((max(others),)))
        if len(mixed) > 1:
            taken += (len(mixed) - 1) * _taken(loaded.device, lambda: engine.record((), mixed[-2:-1]))
    except RuntimeError as error:  # a model that waits for its device, or a device that is full
        return 0, str(error).strip().split("\n")[0]
    return taken + engine.graph_bytes, None


def _taken(device: torch.device, work: Callable[[], None]) -> int:
    """Return the bytes of the device that work keeps."""
    release_cached()
    free, _ = torch.cuda.mem_get_info(device)
    work()
    release_cached()
    left, _ = torch.cuda.mem_get_info(device)
    return max(0, free - left)


def check_room(
    loaded: LoadedModel, make: Callable[[int], StreamEngine], *, tokens: int, rows: int, page_size: int
) -> None:
    """Check that a device has room for the largest step of an engine, which `make` makes with so many pages.

    Raises JobError.
    """
    pages, requests, step = _largest(tokens, rows, page_size)
    try:
        engine = make(pages)
        engine.begin(requests)
        engine.execute(step)
    except torch.OutOfMemoryError as error:
        free = free_memory(loaded.device)
        raise _too_small(loaded, tokens, f"more than the {free:,} bytes that are free") from error
    release_cached()


def run_largest(loaded: LoadedModel, attention: PagedAttention, *, tokens: int, rows: int, page_size: int) -> int:
    """Run a step of so many tokens, of as many sequences as are sampled at once; returns the bytes of its pages."""
    pages, requests, step = _largest(tokens, rows, page_size)
    engine = GpuEngine(loaded, attention, num_pages=pages, page_size=page_size)
    engine.begin(requests)
    engine.execute(step)
    return engine.pages.nbytes


def _largest(tokens: int, rows: int, page_size: int) -> tuple[int, RequestBatch, Step]:
    """Make a step of so many tokens, its requests, and count its pages."""
    rows = min(rows, tokens)
    counts = np.full(rows, tokens // rows, np.int32)
    each = -(-int(counts[0]) // page_size)
    zeros = np.zeros(rows, np.int32)
    requests = RequestBatch(
        tokens=np.zeros(int(counts.sum()), np.int32),
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        max_tokens=zeros + 2,
        params_index=zeros,
        params=(SamplingParams(max_tokens=2),),
        serial=np.arange(rows, dtype=np.uint64),
        recorded=zeros + 2,
    )
    step = Step(
        index=0,
        num_decodes=0,
        slots=np.arange(rows, dtype=np.int32),
        requests=np.arange(rows, dtype=np.int32),
        starts=zeros,
        counts=counts,
        samples=np.ones(rows, np.bool_),
        block_tables=np.arange(rows * each, dtype=np.int32).reshape(rows, each),
    )
    return rows * each, requests, step
