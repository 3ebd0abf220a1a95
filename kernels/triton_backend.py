"""Attention over pages by kernels of our own, in Triton."""

from __future__ import annotations

import torch

from llmbatch.kernels import triton_attention
from llmbatch.kernels.backends import Layout, Plan
from llmbatch.kernels.items import cut_items
from llmbatch.kernels.spec import AttentionSpec

_PROGRAMS = 16  # a multiprocessor, of decodes: enough for the last wave of them to be short
_INTERPRETED = 16  # multiprocessors, where there are none


class TritonAttention:
    """Everything that `AttentionSpec` can say, in float32, float16 and bfloat16 (`PagedAttention`).

    Decodes that share a long prefix attend it together (`cascade`).
    """

    def __init__(self, device: torch.device, *, cascade: bool = True) -> None:
        units = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
        )
        self._programs = _PROGRAMS * units
        self._cascade = cascade

    def plan(self, layout: Layout, spec: AttentionSpec, page_size: int) -> Plan:
        """Items of the step."""
        items = cut_items(
            layout.tables, layout.slots, layout.starts, layout.counts, layout.decodes, page_size,
            triton_attention.block_tokens(spec.group), spec.window, spec.heads, self._programs, self._cascade,
        )  # fmt: skip
        longest = int((layout.starts + layout.counts).max(initial=1))
        tables = layout.tables[layout.slots, : -(-longest // page_size)]
        return Plan((tables, *items), (int(items.parts.max(initial=0)),))

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Decodes, prefills and shared prefixes each in a launch, where there are any, and what was cut merged."""
        tables, decodes, prefills, shared, order, parts = tensors
        (most,) = plan.numbers
        out = torch.empty_like(query)
        sums = query.new_empty((most, len(parts), spec.query_heads), dtype=torch.float32)
        partial = query.new_empty((most, len(parts), spec.query_heads, spec.width), dtype=torch.float32)
        for items, many, rows in ((shared, True, order), (decodes, False, None), (prefills, True, None)):
            triton_attention.attend(
                query, out, partial, sums, keys, values, tables, items, many=many, order=rows, sinks=spec.sinks,
                group=spec.group, scale=spec.scale, window=spec.window, softcap=spec.softcap,
            )  # fmt: skip
        if most:
            triton_attention.merge(out, partial, sums, parts, spec.sinks)
        return out
