"""Attention over pages by kernels of our own, in Triton."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.kernels.cascade import GROUPS, Groups
from llmbatch.kernels.interface import AttentionPlan, BatchLayout
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.kernels.triton import attention as triton_attention
from llmbatch.kernels.work_items import WorkItems, cut_items, most_items

_PROGRAMS = 16  # a multiprocessor, of decodes: enough for the last wave of them to be short
_INTERPRETED = 2  # multiprocessors, where there are none


class TritonAttention:
    """Everything that `AttentionSpec` can express, in float32, float16 and bfloat16 (`GraphCapturable`).

    Decodes that share a long prefix attend it together, if they make `groups`; with `Groups(0)` none do.
    """

    def __init__(self, device: torch.device, groups: Groups = GROUPS) -> None:
        units = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED
        )
        self._programs = _PROGRAMS * units
        self.cascade: bool = groups.rows > 0
        self._groups = groups

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut the step into items."""
        items = self._cut(layout, spec, page_size)
        longest = int((layout.starts + layout.counts).max(initial=1))
        tables = layout.tables[layout.slots, : -(-longest // page_size)]
        return AttentionPlan((tables, *items), (int(items.parts[:, 0].sum()),))

    def plan_fixed(self, layout: BatchLayout, spec: AttentionSpec, page_size: int, width: int) -> AttentionPlan:
        """Cut a step of decodes into items, padded with empty ones to the most that so many decodes can have."""
        items = self._cut(layout, spec, page_size)
        rows, block = len(layout.slots), triton_attention.block_tokens(spec.group)
        most = most_items(rows, block, spec.heads, self._programs, self._groups)
        shares = len(items.shared) > 0
        padded = WorkItems(
            decodes=_padded(items.decodes, most.decodes),
            prefills=items.prefills,
            shared=_padded(items.shared, most.shared if shares else 0),
            order=_padded(items.order, rows if shares else 0),
            parts=items.parts,
        )
        tables = np.zeros((rows, width), np.int32)
        given = layout.tables[layout.slots, :width]
        tables[:, : given.shape[1]] = given
        return AttentionPlan((tables, *padded), (most.decodes + (block * most.shared if shares else 0),))

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attend decodes, prefills and shared prefixes in a launch each, if there are any, and merge what was cut."""
        tables, decodes, prefills, shared, order, parts = tensors
        (waiting,) = plan.numbers
        out = torch.empty_like(query)
        sums = query.new_empty((waiting, spec.query_heads), dtype=torch.float32)
        partial = query.new_empty((waiting, spec.query_heads, spec.width), dtype=torch.float32)
        for items, many, rows in ((shared, True, order), (decodes, False, None), (prefills, True, None)):
            triton_attention.attend(
                query, out, partial, sums, keys, values, tables, items, parts, many=many, order=rows, sinks=spec.sinks,
                group=spec.group, scale=spec.scale, window=spec.window, softcap=spec.softcap,
            )  # fmt: skip  # arguments in groups
        if waiting:
            triton_attention.merge(out, partial, sums, parts, spec.sinks)
        return out

    def _cut(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> WorkItems:
        return cut_items(
            layout.tables,
            layout.slots,
            layout.starts,
            layout.counts,
            layout.decodes,
            page_size,
            triton_attention.block_tokens(spec.group),
            spec.window,
            spec.heads,
            self._programs,
            self._groups,
        )


def _padded(array: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Append rows of zeros, up to so many: an item of no tokens does nothing."""
    assert len(array) <= rows, "there are more items than there can be"
    out = np.zeros((rows, *array.shape[1:]), np.int32)
    out[: len(array)] = array
    return out
