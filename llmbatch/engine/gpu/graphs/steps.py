"""All recorded steps of an engine: those of decodes, and those with chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.attention import GpuKVCache
from llmbatch.engine.gpu.batch import DeviceBatch, HostBatch
from llmbatch.engine.gpu.graphs.mixed import MixedGraphs
from llmbatch.engine.gpu.graphs.recorder import (
    MOST_ROWS,
    DecodeGraphs,
    Forward,
    Recorder,
    Recording,
    Recordings,
    rows_of,
)
from llmbatch.kernels.interface import GraphCapturable, PagedAttention
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step


class StepGraphs:
    """Records steps before a job, and runs those that are recorded. `pages` has a page to spare, its last.

    `forward` makes the forward of a model that attends as it is told.
    """

    def __init__(
        self,
        forward: Callable[[PagedAttention], Forward],
        attention: GraphCapturable,
        pages: GpuKVCache,
        recorder: Recorder,
        *,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._windowed = pages.window_pages > 0
        kinds = {spec.kind for spec in pages.specs.values()}
        self._recordings = Recordings(recorder, kinds, vocabulary=vocabulary, dtype=dtype, device=device)
        self._decodes = DecodeGraphs(forward(attention), attention, pages, self._recordings)
        self._mixed = MixedGraphs(forward(attention.padded), attention.padded, pages, self._recordings)

    @property
    def nbytes(self) -> int:
        """Bytes of what all recordings read and write."""
        return self._recordings.nbytes

    def record(self, decodes: Iterable[int], mixed: Iterable[int], rates: Rates | None) -> None:
        """Record steps of so many decodes each, and steps with chunks of so many tokens, the largest first.

        With window pages none with chunks are recorded. Those that at these `rates` gain nothing are not repeated.
        """
        self._mixed.rates = rates
        chunks: set[int] = set() if self._windowed else set(mixed)
        rows = {rows_of(count) for count in decodes if count <= MOST_ROWS}
        for tokens in sorted(chunks | rows, reverse=True):
            if tokens in chunks:
                self._mixed.record(tokens)
            if tokens in rows:
                self._decodes.record(tokens)

    def find(self, step: Step, generation: TokenBuffers) -> tuple[HostBatch, Recording] | None:
        """Pack a step and find its recording, or return None if there is none."""
        graphs = self._decodes if step.num_decodes == len(step.slots) else self._mixed
        return graphs.find(step, generation)

    def recording_of(self, packed: HostBatch) -> Recording:
        """Return the recording of a batch that was found on another rank, which recorded the same."""
        found = self._recordings.find(packed)
        assert found is not None, "all ranks record the same"
        return found

    def repeat(self, packed: HostBatch, recording: Recording) -> tuple[DeviceBatch, torch.Tensor]:
        """Run what was found and filled in, as `Recordings.repeat` does."""
        return self._recordings.repeat(packed, recording)
