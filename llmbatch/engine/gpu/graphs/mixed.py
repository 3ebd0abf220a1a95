"""Steps with chunks, brought to a few recorded shapes (`llmbatch.engine.gpu.graphs.recorder`).

The launches of a recorded step are those of a number of tokens and a number of sampled rows. Attention has tables with
room for any step of so many tokens, and reads from memory how many items there are, so nothing else of the step shows
in its launches.

A recording spares a device from waiting for its host. That takes 12 ms at best to launch the 350 kernels of 32 layers,
and three times as long when others use it too (docs/decisions/0092). So the tokens that a device computes in the longer
time are the most that are recorded (`mixed_sizes`). Sizes are an eighth apart, so padding costs a sixteenth in the
mean. There are three numbers of sampled rows, since logits of a large vocabulary for 512 rows take as long as a layer
or two.

A step of such a size that reads much KV can take the device longer still. It gains nothing from being repeated, and
attends a little faster on two streams, so it is launched.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import numpy as np

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.attention import GpuKVCache, plan_layers
from llmbatch.engine.gpu.batch import HostBatch, Kind
from llmbatch.engine.gpu.graphs.recorder import MOST_ROWS, Forward, RecordedSizes, Recording, Recordings
from llmbatch.engine.gpu.step_cost import StepCost
from llmbatch.engine.packing import PackedTokens
from llmbatch.kernels.interface import BatchLayout, PaddedAttention
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step

MOST_TOKENS: Final = 2048  # of a recorded step
SAMPLED_ROWS: Final = (256, 512, MOST_ROWS)
_LAYER_SECONDS: Final = 1.1e-3  # that a busy host takes for a layer's eleven kernels, as measured beside an H200
_LEAST_APART: Final = 32  # tokens


def mixed_sizes(layers: int, rates: Rates) -> tuple[int, ...]:
    """Choose the numbers of tokens to record for a model of so many layers, in rising order.

    The largest is what a device computes at these rates while a busy host launches a step. There are none if reading
    the weights takes half of that time: the host is not what such a step waits for.
    """
    launching = layers * _LAYER_SECONDS
    if 2.0 * rates.weight_seconds >= launching:
        return ()
    most = min(MOST_TOKENS, int(launching / rates.seconds_per_token))
    sizes, tokens = list[int](), _LEAST_APART
    while tokens <= most:
        sizes.append(tokens)
        tokens += max(_LEAST_APART, (1 << tokens.bit_length()) // 16)
    return tuple(sizes)


class MixedGraphs:
    """Brings steps with chunks to recorded shapes. `pages` has a page to spare, its last, and no window pages."""

    def __init__(self, forward: Forward, attention: PaddedAttention, pages: GpuKVCache, recordings: Recordings) -> None:
        self._forward = forward
        self._attention = attention
        self._pages = pages
        self._recordings = recordings
        self._sizes = RecordedSizes()
        self.rates: Rates | None = None  # of the device, where they are known

    def record(self, tokens: int) -> None:
        """Record steps of so many tokens, padded as they will be, most sampled rows first; larger ones came before."""
        rows = sorted({min(tokens, rows) for rows in SAMPLED_ROWS}, reverse=True)
        first = self._stand_in(tokens, rows[0])
        self._recordings.record(first, self._forward)
        if not self._sizes.keep(tokens, self._recordings.seconds(first)):
            self._recordings.forget(first)
            return
        for fewer in rows[1:]:
            self._recordings.record(self._stand_in(tokens, fewer), self._forward)

    def find(self, step: Step, generation: TokenBuffers) -> tuple[HostBatch, Recording] | None:
        """Pack a step with chunks and find its recording, or return None if there is none."""
        tokens, sampled = self._sizes.find(step.num_tokens), int(step.samples.sum())
        if tokens is None or sampled > MOST_ROWS or not self._gains(step):
            return None
        size = self._pages.page_size
        if not self._recordings.has_room(int((-(-(step.starts + step.counts) // size)).sum())):
            return None
        layout = BatchLayout(step.block_tables, step.slots, step.starts, step.counts, step.num_decodes)
        packed = HostBatch.of(step, generation, size, self._plan(layout, tokens))
        packed = packed.padded(tokens, _rows(sampled, tokens), self._pages.spare, self._pages.window_spare)
        recording = self._recordings.find(packed)
        return None if recording is None else (packed, recording)

    def _gains(self, step: Step) -> bool:
        """Tell whether the host would take longer to launch a step than the device to compute it; True if unknown."""
        return self.rates is None or StepCost.of(step, self.rates).in_turn < len(self._pages.specs) * _LAYER_SECONDS

    def _stand_in(self, tokens: int, rows: int) -> HostBatch:
        """Make a step of so many tokens, of which so many rows are sampled, that is padding alone."""
        zeros = np.zeros(tokens, np.int32)
        none = zeros[:0]
        plans = self._plan(BatchLayout(zeros[:1, None], none, none, none, 0), tokens)
        packed = PackedTokens(zeros, zeros, zeros + np.int32(self._pages.spare))
        return HostBatch((*packed, zeros[:rows], zeros[:rows]), plans, rows)

    def _plan(self, layout: BatchLayout, tokens: int) -> dict[Kind, Any]:
        pages, size = self._pages, self._pages.page_size
        return plan_layers(
            pages, layout, None, lambda given, spec: self._attention.plan_padded(given, spec, size, tokens)
        )


def _rows(sampled: int, tokens: int) -> int:
    """Round sampled rows up to a recorded number of them."""
    return min(tokens, SAMPLED_ROWS[bisect_left(SAMPLED_ROWS, sampled)])
