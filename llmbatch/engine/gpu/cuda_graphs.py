"""Forwards of pure decodes, recorded once for each shape and replayed.

A small step takes a device less time than the host needs to launch its hundreds of kernels. A recorded forward is one
launch. It reads and writes fixed memory, and its launches are those of its shape. So a step is padded to the next
recorded number of rows, with rows that decode a token at a page of their own, and its inputs are copied to where the
recorded forward reads them. Logits of all recordings go to one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch

from llmbatch.engine.generation import TokenBuffers
from llmbatch.engine.gpu.attention import GpuKVCache, plan_layers
from llmbatch.engine.gpu.batch import DeviceBatch, HostBatch, split, stage
from llmbatch.kernels.interface import BatchLayout, GraphCapturable
from llmbatch.scheduler.output import Step

MOST_ROWS: Final = 512  # of a step that is repeated; the device takes longer than the host for larger ones
_LEAST_WIDTH: Final = 64  # pages of a table

Forward = Callable[[DeviceBatch], torch.Tensor]


class Recorder(Protocol):
    """Makes work on a device repeatable."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the work over the same memory. Runs it once, before recording."""
        ...


class GraphRecorder:
    """CUDA graphs, which share their memory (`Recorder`): one is run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record a graph."""
        warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup):
            work()  # compiles kernels, and gives libraries their memory
        torch.cuda.current_stream().wait_stream(warmup)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = self._pool or graph.pool()
        repeat: Callable[[], None] = graph.replay
        return repeat


class _Recording:
    """A recorded forward and the memory it reads."""

    def __init__(self, packed: HostBatch, device: torch.device) -> None:
        self._arrays = packed.arrays
        self._device = device
        self._uploaded = stage(self._arrays, device).to(device)
        batch = packed.take(split(self._uploaded, self._arrays))
        self._given = batch.ids
        self.batch = batch._replace(ids=torch.zeros_like(batch.ids))
        self.repeat: Callable[[], None] = lambda: None

    def fill(self, packed: HostBatch, known: torch.Tensor) -> None:
        """Copy a step of the same shape to where it is read."""
        self._uploaded.copy_(stage(packed.arrays, self._device), non_blocking=True)
        self.batch.ids.copy_(known_ids(self._given, known))


def known_ids(ids: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Look up tokens, taking generated ones from where they are `known`."""
    return torch.where(ids < 0, known[(-1 - ids).clamp(min=0)], ids)


class DecodeGraphRunner:
    """Runs steps of decodes by the recording of their shape. `pages` has a page to spare, its last."""

    def __init__(
        self,
        forward: Forward,
        attention: GraphCapturable,
        pages: GpuKVCache,
        recorder: Recorder,
        *,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._pages = pages
        self._recorder = recorder
        self._device = device
        self._logits = torch.empty(MOST_ROWS, vocabulary, dtype=dtype, device=device)
        self._recordings: dict[tuple[Any, ...], _Recording] = {}

    def takes(self, step: Step) -> bool:
        """Tell whether a step is one that is recorded and replayed."""
        return step.num_decodes == len(step.slots) <= MOST_ROWS

    def run(self, step: Step, generation: TokenBuffers, known: torch.Tensor) -> tuple[DeviceBatch, torch.Tensor]:
        """Run a step; returns the padded batch, and the logits [rows, vocabulary] of the rows that are not padding.

        They are valid until the next step. `known` are the generated tokens, flat.
        """
        packed = self._padded(step, generation)
        recording = self._recordings.get(_key(packed)) or self._record(packed)
        recording.fill(packed, known)
        recording.repeat()
        return recording.batch, self._logits[: packed.rows]

    def _padded(self, step: Step, generation: TokenBuffers) -> HostBatch:
        pages, count = self._pages, len(step.slots)
        rows = rows_of(count)
        longest = int(step.starts.max()) + 1
        width = max(_LEAST_WIDTH, 1 << (-(-longest // pages.page_size) - 1).bit_length())
        # What is there for the number's sake reads one key: the first of the first row, which is there.
        more = rows - count
        slots = np.concatenate((step.slots, np.full(more, step.slots[0])))
        starts = np.pad(step.starts, (0, more))
        layout = BatchLayout(step.block_tables, slots, starts, np.ones(rows, np.int32), rows)
        plans = plan_layers(
            pages.specs.values(), lambda spec: self._attention.plan_fixed(layout, spec, pages.page_size, width)
        )
        return HostBatch.of(step, generation, pages.page_size, plans).padded(
            rows, (pages.num_pages - 1) * pages.page_size
        )

    def _record(self, packed: HostBatch) -> _Recording:
        recording = _Recording(packed, self._device)
        rows = len(packed.columns[0])

        def work() -> None:
            self._logits[:rows].copy_(self._forward(recording.batch))

        recording.repeat = self._recorder.record(work)
        self._recordings[_key(packed)] = recording
        return recording


def rows_of(count: int) -> int:
    """Round the number of rows up to a recorded one: at most an eighth more."""
    step = max(1, 1 << (count.bit_length() - 4)) if count > 8 else 1
    return min(MOST_ROWS, -(-count // step) * step)


def _key(packed: HostBatch) -> tuple[Any, ...]:
    return (*(array.shape for array in packed.arrays), *(plan.numbers for plan in packed.plans.values()))
