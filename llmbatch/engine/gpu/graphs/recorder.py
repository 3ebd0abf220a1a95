"""Forwards of small steps, recorded once for each shape before a job, and replayed; and how decodes are brought to one.

A small step takes a device less time than the host needs to launch its hundreds of kernels. A recorded forward is one
launch. It reads and writes fixed memory, and its launches are those of its shape. So a step is padded to the next
recorded one, and its inputs are copied to where the recorded forward reads them. A step of decodes is padded with rows
that decode a token at a page of their own; one with chunks: `llmbatch.engine.gpu.graphs.mixed`. The pages of all its
rows are of any number; they go to one table, which all recordings read. Logits of all recordings go to one buffer.

Recordings share one pool of memory, of which each takes blocks that an earlier one has left: so the largest is recorded
first, and the others take nothing more (docs/decisions/0044).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.attention import GpuKVCache, plan_layers
from llmbatch.engine.gpu.batch import DeviceBatch, HostBatch, Kind, batch_of, lengthened, split, stage
from llmbatch.engine.packing import PackedTokens
from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS
from llmbatch.kernels.interface import BatchLayout, GraphCapturable
from llmbatch.scheduler.output import Step

MOST_ROWS: Final = 1024  # of a step that is repeated; of more, a device takes longer than a busy host
_TIMED: Final = 3  # repetitions
_TABLE: Final = 1 << 20  # pages that the rows of a step may list, one that several rows share for each of them

Forward = Callable[[DeviceBatch], torch.Tensor]


class Recorder(Protocol):
    """Makes work on a device repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the work over the same memory. Runs it once, before recording."""
        ...

    def seconds(self, repeat: Callable[[], None]) -> float:
        """Time recorded work on the device; 0 where that says nothing."""
        ...


class GraphRecorder:
    """CUDA graphs, which share their memory (`Recorder`): one is run at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._warmup: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record a graph. Raises RuntimeError if the work cannot be recorded."""
        self._warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._warmup):
            work()  # compiles kernels, and gives libraries their memory
        torch.cuda.current_stream().wait_stream(self._warmup)
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer stream is current again even if the recording fails to end, after which torch leaves its own on.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=self._pool):
                work()
        except RuntimeError:
            end_recording(self._pool)
            self._pool = torch.cuda.graph_pool_handle()  # pinned memory takes the old one to be recorded still
            raise
        repeat: Callable[[], None] = graph.replay
        return repeat

    def seconds(self, repeat: Callable[[], None]) -> float:
        """Take the median of a few repetitions."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]  # type: ignore[no-untyped-call]
        repeat()
        for mark in marks[:-1]:
            mark.record()
            repeat()
        marks[-1].record()
        marks[-1].synchronize()
        return float(median(begun.elapsed_time(ended) for begun, ended in pairwise(marks))) / 1e3


def end_recording(pool: Any) -> None:
    """Let the allocator know that a recording has failed.

    torch 2.11 does not tell it, and asserts in the next `empty_cache` that nothing is being recorded; later ones do,
    and refuse to be told again.
    """
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def release_cached() -> None:
    """Give memory that nothing uses back to the device, unless the allocator cannot after a recording that failed."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


class Recording:
    """A recorded forward and the memory it reads."""

    def __init__(self, packed: HostBatch, tables: dict[Kind, torch.Tensor], device: torch.device) -> None:
        self._tables = tables
        self._device = device
        arrays = _fixed(packed)
        self._uploaded = stage(arrays, device).to(device)
        tensors = iter(split(self._uploaded, arrays))
        columns = [next(tensors) for _ in packed.columns]
        plans = {
            kind: (plan, [tables[kind], *(next(tensors) for _ in plan.arrays)]) for kind, plan in packed.plans.items()
        }
        self._given = columns[0]
        self.batch = batch_of((torch.zeros_like(columns[0]), *columns[1:]), plans)
        self.repeat: Callable[[], None] = lambda: None

    def fill(self, packed: HostBatch, known: torch.Tensor) -> None:
        """Copy a step of the same shape to where it is read; `known` as for `look_up`."""
        self._uploaded.copy_(stage(_fixed(packed), self._device), non_blocking=True)
        for kind, plan in packed.plans.items():
            pages = stage([plan.pages], self._device)
            self._tables[kind][: len(pages)].copy_(pages, non_blocking=True)
        self.batch.ids.copy_(look_up(self._given, known))


def look_up(ids: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
    """Put tokens of `generated`, flat, where `ids` refer to it."""
    return torch.where(ids < 0, generated[(-1 - ids).clamp(min=0)], ids)


class Recordings:
    """Recorded forwards by their shapes, and the buffers that all of them share, for layers of these `kinds`."""

    def __init__(
        self, recorder: Recorder, kinds: Iterable[Kind], *, vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._logits = torch.empty(MOST_ROWS, vocabulary, dtype=dtype, device=device)
        self._tables: dict[Kind, torch.Tensor] = {
            kind: torch.zeros(_TABLE, dtype=torch.int32, device=device) for kind in kinds
        }
        self._recordings: dict[tuple[Any, ...], Recording] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and the logits."""
        return self._logits.nbytes + sum(table.nbytes for table in self._tables.values())

    def record(self, packed: HostBatch, forward: Forward) -> None:
        """Record the forward of a batch, over memory of its own."""
        recording = Recording(packed, self._tables, self._device)
        recording.fill(packed, torch.zeros(1, dtype=torch.int32, device=self._device))
        rows = len(packed.columns[3])

        def work() -> None:
            self._logits[:rows].copy_(forward(recording.batch))

        recording.repeat = self._recorder.record(work)
        self._recordings[_key(packed)] = recording

    def seconds(self, packed: HostBatch) -> float:
        """Time the recording of a batch's shapes, as it was last filled."""
        return self._recorder.seconds(self._recordings[_key(packed)].repeat)

    def forget(self, packed: HostBatch) -> None:
        """Let go of the recording of a batch's shapes."""
        del self._recordings[_key(packed)]

    def find(self, packed: HostBatch) -> Recording | None:
        """Find the recording of a batch's shapes, or return None if there is none."""
        return self._recordings.get(_key(packed))

    def has_room(self, pages: int) -> bool:
        """Tell whether the tables have room for the pages that a step lists, and for those of its padding."""
        return bool(self._recordings) and pages + MOST_ROWS <= _TABLE

    def repeat(self, packed: HostBatch, recording: Recording) -> tuple[DeviceBatch, torch.Tensor]:
        """Run a step that was filled in; returns the padded batch, and the logits [rows, vocabulary] of real rows.

        They are valid until the next step.
        """
        recording.repeat()
        return recording.batch, self._logits[: packed.rows]


class RecordedSizes:
    """The numbers of tokens that steps are padded to: of each a recording takes less than of any larger one.

    Products of some numbers of rows take twice as long as those of a few more, since libraries choose kernels by rules
    (docs/decisions/0092).
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._rising: list[int] = []

    def keep(self, tokens: int, seconds: float) -> bool:
        """Take a size unless its recording takes no less than a larger one's; tell whether it was. 0 says nothing."""
        if any(0.0 < more <= seconds for larger, more in self._seconds.items() if larger > tokens):
            return False
        self._seconds[tokens] = seconds
        self._rising = sorted(self._seconds)
        return True

    def find(self, tokens: int) -> int | None:
        """Return the smallest that has room for so many tokens; None if none has."""
        at = bisect_left(self._rising, tokens)
        return self._rising[at] if at < len(self._rising) else None


class DecodeGraphs:
    """Brings steps of decodes to recorded shapes. `pages` has a page to spare, its last."""

    def __init__(self, forward: Forward, attention: GraphCapturable, pages: GpuKVCache, recordings: Recordings) -> None:
        self._forward = forward
        self._attention = attention
        self._pages = pages
        self._recordings = recordings
        self._sizes = RecordedSizes()

    def record(self, rows: int) -> None:
        """Record steps of so many rows, padded as they will be; larger ones came before."""
        alone = self._stand_in(rows, 0)
        self._recordings.record(alone, self._forward)
        if not self._sizes.keep(rows, self._recordings.seconds(alone)):
            self._recordings.forget(alone)
        elif self._attention.cascade and rows >= GROUP_ROWS:
            self._recordings.record(self._stand_in(rows, GROUP_TOKENS), self._forward)

    def find(self, step: Step, generation: TokenBuffers) -> tuple[HostBatch, Recording] | None:
        """Pack a step of decodes and find its recording, or return None if there is none."""
        rows = self._sizes.find(len(step.slots)) if step.num_decodes == len(step.slots) else None
        if rows is None:
            return None
        if not self._recordings.has_room(int((step.starts // self._pages.page_size + 1).sum())):
            return None
        packed = self._padded(step, generation, rows)
        recording = self._recordings.find(packed)
        return None if recording is None else (packed, recording)

    def _padded(self, step: Step, generation: TokenBuffers, rows: int) -> HostBatch:
        count = len(step.slots)
        # What is there for the number's sake reads one key: the first of the first row, which is there.
        slots = np.concatenate((step.slots, np.full(rows - count, step.slots[0])))
        layout = BatchLayout(step.block_tables, slots, lengthened(step.starts, rows), np.ones(rows, np.int32), rows)
        packed = HostBatch.of(step, generation, self._pages.page_size, self._plan(layout, step.window_tables))
        return packed.padded(rows, rows, self._pages.spare, self._pages.window_spare)

    def _stand_in(self, rows: int, shared: int) -> HostBatch:
        """Make a step of so many rows, with the same `shared` tokens before them, at the page to spare."""
        size, spare, window_spare = self._pages.page_size, self._pages.spare, self._pages.window_spare
        windowed = self._pages.window_pages > 0
        zeros = np.zeros(rows, np.int32)
        tables = np.full((1, shared // size + 1), spare // size, np.int32)
        window_tables = np.full_like(tables, window_spare // size) if windowed else None
        plans = self._plan(BatchLayout(tables, zeros, zeros + shared, zeros + 1, rows), window_tables)
        tokens = PackedTokens(zeros, zeros + shared, zeros + spare)
        in_windows = (zeros + window_spare,) if windowed else ()
        return HostBatch((*tokens, np.arange(rows, dtype=np.int32), zeros, *in_windows), plans, rows)

    def _plan(self, layout: BatchLayout, window_tables: NDArray[np.int32] | None) -> dict[Kind, Any]:
        pages, size = self._pages, self._pages.page_size
        return plan_layers(
            pages, layout, window_tables, lambda given, spec: self._attention.plan_fixed(given, spec, size)
        )


def rows_of(count: int) -> int:
    """Round the number of rows up to a recorded one: at most an eighth more."""
    step = max(1, 1 << (count.bit_length() - 4)) if count > 8 else 1
    return min(MOST_ROWS, -(-count // step) * step)


def _fixed(packed: HostBatch) -> list[Any]:
    """List the arrays whose shapes are those of the recording."""
    return [*packed.columns, *(array for plan in packed.plans.values() for array in plan.arrays)]


def _key(packed: HostBatch) -> tuple[Any, ...]:
    return (*(array.shape for array in _fixed(packed)), *(plan.numbers for plan in packed.plans.values()))
