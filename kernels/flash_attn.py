"""Attention over pages by the flash-attn package, whichever of its generations is installed (3, 4 or 2)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch

from llmbatch.choices import AttentionName
from llmbatch.kernels.interface import AttentionPlan, BatchLayout
from llmbatch.kernels.spec import AttentionSpec

_PAGE_OF_2: Final = 256  # tokens: what pages of flash-attn 2 are multiples of
_MODULES: Final = ("flash_attn_interface", "flash_attn.cute", "flash_attn")  # of generation 3, 4, 2


class FlashAttention:
    """Decodes and prefills in one launch (`PagedAttention`). Raises ImportError if the package is not installed."""

    name: AttentionName = "flash-attn"
    cascade = False

    def __init__(self) -> None:
        for module, call in zip(_MODULES, (_call_3, _call_4, _call_2), strict=True):
            try:
                self._module: Any = import_module(module)
            except ImportError:
                continue
            self._call: Callable[..., torch.Tensor] = call
            return
        raise ImportError("flash-attn is not installed: pip install flash-attn")

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Plan the lengths of the step's sequences. Raises ValueError if the package has no kernel for `spec`."""
        if self._call is _call_2 and page_size % _PAGE_OF_2:
            raise ValueError(
                f"flash-attn 2 takes pages of a multiple of {_PAGE_OF_2} tokens, and these have {page_size}: "
                f"page_size={_PAGE_OF_2} (--page-size {_PAGE_OF_2})"
            )
        if spec.sinks is not None:
            raise ValueError("flash-attn has no attention sinks here: take attention='triton'")
        return plan_lengths(layout, page_size)

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: AttentionPlan,
        tensors: list[torch.Tensor],
    ) -> torch.Tensor:
        """Attend all rows over their pages. Raises ValueError if these are of another type."""
        check_pages("flash-attn", query, keys)
        packed = query.view(len(query), spec.query_heads, spec.width)
        window = (spec.window - 1 if spec.window else -1, 0 if spec.window else -1)
        out = self._call(
            self._module, spec, packed, keys.transpose(1, 2), values.transpose(1, 2), window, plan,
            *tables_first(tensors),
        )  # fmt: skip  # arguments in groups
        return out.reshape(query.shape)


def check_pages(name: str, query: torch.Tensor, keys: torch.Tensor) -> None:
    """Check that pages are of the type of queries. Raises ValueError."""
    if keys.dtype != query.dtype:
        kept = str(keys.dtype).removeprefix("torch.")
        raise ValueError(f"{name} reads no pages of {kept} here: take attention='triton' (--attention triton)")


def plan_lengths(layout: BatchLayout, page_size: int) -> AttentionPlan:
    """Compute the block tables and lengths of a step.

    Its pages are the tables, flat: as wide as the longest sequence, since these kernels read no others. Its arrays are
    the first packed row of each sequence, the tokens of each including those computed now, and their sums.
    """
    lengths = layout.starts + layout.counts
    longest = int(lengths.max())
    first = np.concatenate(([0], np.cumsum(layout.counts))).astype(np.int32)
    sums = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tables = layout.tables[layout.slots, : -(-longest // page_size)]
    return AttentionPlan(tables.reshape(-1), (first, lengths, sums), (int(layout.counts.max()), longest))


def tables_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give the pages of `plan_lengths` back their shape [sequences, pages]."""
    pages, first, lengths, sums = tensors
    return [pages.view(len(lengths), -1), first, lengths, sums]


def _call_3(
    module: Any,
    spec: AttentionSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: tuple[int, int],
    plan: AttentionPlan,
    tables: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    _: torch.Tensor,
) -> torch.Tensor:
    out: torch.Tensor = module.flash_attn_with_kvcache(
        query,
        keys,
        values,
        cache_seqlens=lengths,
        page_table=tables,
        cu_seqlens_q=first,
        max_seqlen_q=plan.numbers[0],
        softmax_scale=spec.scale,
        causal=True,
        window_size=window,
        softcap=spec.softcap,
    )
    return out


def _call_4(
    module: Any,
    spec: AttentionSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: tuple[int, int],
    plan: AttentionPlan,
    tables: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    _: torch.Tensor,
) -> torch.Tensor:
    sides = tuple(None if side < 0 else side for side in window)
    out = module.flash_attn_varlen_func(
        query,
        keys,
        values,
        cu_seqlens_q=first,
        seqused_k=lengths,
        page_table=tables,
        softmax_scale=spec.scale,
        causal=True,
        window_size=sides,
        softcap=spec.softcap,
    )
    taken: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return taken


def _call_2(
    module: Any,
    spec: AttentionSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: tuple[int, int],
    plan: AttentionPlan,
    tables: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    sums: torch.Tensor,
) -> torch.Tensor:
    out: torch.Tensor = module.flash_attn_varlen_func(
        query,
        keys,
        values,
        first,
        sums,
        *plan.numbers,
        softmax_scale=spec.scale,
        causal=True,
        window_size=window,
        softcap=spec.softcap,
        block_table=tables,
    )
    return out
