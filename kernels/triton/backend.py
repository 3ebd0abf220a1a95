"""Attention over pages by kernels of our own, in Triton."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.kernels.cascade import GROUPS, Groups
from llmbatch.kernels.interface import AttentionPlan, BatchLayout
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.kernels.triton import attention as triton_attention
from llmbatch.kernels.triton.side_stream import SideStream
from llmbatch.kernels.work_items import WorkItems, cut_items, most_items

_PROGRAMS = 16  # a multiprocessor, of decodes: enough for the last wave of them to be short
_INTERPRETED = 2  # multiprocessors, where there are none
_PARTS = 4  # among the arrays of a plan


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
        self._beside = SideStream(device)

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut the step into items."""
        pages, *items = self._cut(layout, spec, page_size)
        return AttentionPlan(pages, tuple(items), (int(items[_PARTS][:, 0].sum()),))

    def plan_fixed(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut a step of decodes into items, padded with empty ones to the most that so many decodes can have."""
        items = self._cut(layout, spec, page_size)
        rows, block = len(layout.slots), triton_attention.block_tokens(spec.group)
        most = most_items(rows, block, spec.heads, self._programs, self._groups)
        shares = len(items.shared) > 0
        fixed = (
            _padded(items.decodes, most.decodes),
            items.prefills,
            _padded(items.shared, most.shared if shares else 0),
            _padded(items.order, rows if shares else 0),
            items.parts,
            np.arange(rows, dtype=np.int32),
        )
        return AttentionPlan(items.pages, fixed, (most.decodes + (block * most.shared if shares else 0),))

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attend blocks of rows and decodes at the same time, and merge what was cut.

        Decodes wait for memory and blocks for the matrix units; a program of each fits a multiprocessor.
        """
        pages, decodes, prefills, shared, order, parts, merged = tensors
        (num_partials,) = plan.numbers
        out = torch.empty_like(query)
        sums = query.new_empty((num_partials, spec.query_heads), dtype=torch.float32)
        partial = query.new_empty((num_partials, spec.query_heads, spec.width), dtype=torch.float32)

        def launch(items: torch.Tensor, *, blocks: bool, rows: torch.Tensor | None = None) -> None:
            triton_attention.attend(
                query, out, partial, sums, keys, values, pages, items, parts, blocks=blocks, order=rows,
                sinks=spec.sinks, group=spec.group, scale=spec.scale, window=spec.window, softcap=spec.softcap,
            )  # fmt: skip  # arguments in groups

        def attend_blocks() -> None:
            launch(prefills, blocks=True)
            launch(shared, blocks=True, rows=order)

        if len(decodes) and len(prefills) + len(shared):
            self._beside.run(attend_blocks, lambda: launch(decodes, blocks=False))
        else:
            attend_blocks()
            launch(decodes, blocks=False)
        if num_partials:
            triton_attention.merge(out, partial, sums, parts, merged, spec.sinks)
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
