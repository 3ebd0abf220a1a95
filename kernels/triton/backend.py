"""Attention over pages by kernels of our own, in Triton: blocks of many rows and decodes side by side."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.choices import AttentionName
from llmbatch.kernels.cascade import GROUPS, Groups
from llmbatch.kernels.interface import AttentionPlan, BatchLayout
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.kernels.triton import attention as triton_attention
from llmbatch.kernels.triton.grid import attend_in_turn
from llmbatch.kernels.triton.merge import merge
from llmbatch.kernels.triton.side_stream import SideStream
from llmbatch.kernels.work_items import (
    COLUMNS,
    FIRST,
    PART,
    TOKENS,
    WorkItems,
    cut_items,
    most_items,
    most_mixed_items,
)

_PROGRAMS = 16  # a multiprocessor, of decodes: enough for the last wave of them to be short
_INTERPRETED = 2  # multiprocessors, where there are none
_PARTS = 4  # among the arrays of a plan


class TritonAttention:
    """Everything that `AttentionSpec` can express, in float32, float16 and bfloat16 (`GraphCapturable`).

    Decodes that share a long prefix attend it together, if they make `groups`; with `Groups(0)` none do.
    """

    name: AttentionName = "triton"

    def __init__(self, device: torch.device, groups: Groups = GROUPS) -> None:
        self._programs = _PROGRAMS * _multiprocessors(device)
        self.cascade: bool = groups.rows > 0
        self._groups = groups
        self._beside = SideStream(device)
        self.padded: PaddedLaunches = PaddedLaunches(device, self._beside, groups)

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut the step into items."""
        pages, *items = _cut(layout, spec, page_size, self._programs, self._groups)
        return AttentionPlan(pages, tuple(items), (int(items[_PARTS][:, 0].sum()),))

    def plan_fixed(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut a step of decodes into items, padded with empty ones to the most that so many decodes can have."""
        items = _cut(layout, spec, page_size, self._programs, self._groups)
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
            self._beside.run(lambda: launch(decodes, blocks=False), attend_blocks)
        else:
            attend_blocks()
            launch(decodes, blocks=False)
        if num_partials:
            merge(out, partial, sums, parts, merged, spec.sinks)
        return out


class PaddedLaunches:
    """The same by launches that are those of any step of so many tokens (`PaddedAttention`).

    Tables have room for the most items that such a step can have. How many blocks it has is on the device.
    """

    name: AttentionName = "triton"

    def __init__(self, device: torch.device, beside: SideStream, groups: Groups = GROUPS) -> None:
        self._units = _multiprocessors(device)
        self.cascade: bool = groups.rows > 0
        self._groups = groups
        self._beside = beside

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Cut the step into items."""
        return self.plan_padded(layout, spec, page_size, int(layout.counts.sum()))

    def plan_padded(self, layout: BatchLayout, spec: AttentionSpec, page_size: int, tokens: int) -> AttentionPlan:
        """Cut the step into items, in tables for any step of so many tokens; tokens beyond those of the step get 0."""
        programs, block = _PROGRAMS * self._units, triton_attention.block_tokens(spec.group)
        items = _cut(layout, spec, page_size, programs, self._groups)
        most = most_mixed_items(tokens, block, spec.heads, programs, self._groups)
        shared = items.shared.copy()
        shared[:, FIRST] += tokens  # behind the tokens in their own order
        blocks = np.concatenate((shared, items.prefills, _without_keys(int(layout.counts.sum()), tokens, block)))
        arrays = (
            _padded(items.decodes, most.decodes),
            _padded(blocks, most.blocks),
            _padded(np.concatenate((np.arange(tokens, dtype=np.int32), items.order)), 2 * tokens),
            _padded(items.parts, tokens),
            np.arange(tokens, dtype=np.int32),
            np.array([len(blocks)], np.int32),
        )
        return AttentionPlan(items.pages, arrays, (most.parts,))

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attend decodes and blocks at the same time, and merge what was cut: three launches."""
        pages, decodes, blocks, order, parts, merged, count = tensors
        (num_partials,) = plan.numbers
        out = torch.empty_like(query)
        sums = query.new_empty((num_partials, spec.query_heads), dtype=torch.float32)
        partial = query.new_empty((num_partials, spec.query_heads, spec.width), dtype=torch.float32)

        def attend_decodes() -> None:
            triton_attention.attend(
                query, out, partial, sums, keys, values, pages, decodes, parts, blocks=False,
                sinks=spec.sinks, group=spec.group, scale=spec.scale, window=spec.window, softcap=spec.softcap,
            )  # fmt: skip  # arguments in groups

        def attend_blocks() -> None:
            attend_in_turn(
                query, out, partial, sums, keys, values, pages, blocks, order, parts, count, units=self._units,
                sinks=spec.sinks, group=spec.group, scale=spec.scale, window=spec.window, softcap=spec.softcap,
            )  # fmt: skip  # arguments in groups

        self._beside.run(attend_decodes, attend_blocks)
        merge(out, partial, sums, parts, merged, spec.sinks)
        return out


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _INTERPRETED


def _cut(layout: BatchLayout, spec: AttentionSpec, page_size: int, programs: int, groups: Groups) -> WorkItems:
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
        programs,
        groups,
    )


def _without_keys(first: int, end: int, block: int) -> NDArray[np.int32]:
    """Make items of tokens that attend nothing, from one to another; their results are 0."""
    firsts = np.arange(first, end, block, dtype=np.int32)
    items = np.zeros((len(firsts), COLUMNS), np.int32)
    items[:, FIRST], items[:, TOKENS], items[:, PART] = firsts, np.minimum(block, end - firsts), -1
    return items


def _padded(array: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Append rows of zeros, up to so many: an item of no tokens does nothing."""
    assert len(array) <= rows, "there are more items than there can be"
    out = np.zeros((rows, *array.shape[1:]), np.int32)
    out[: len(array)] = array
    return out
