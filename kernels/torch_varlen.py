"""Attention over pages by torch's own `varlen_attn`, if torch can read pages (2.12 and later, with flash-attn 3)."""

from __future__ import annotations

import inspect

import torch

from llmbatch.choices import AttentionName
from llmbatch.kernels.flash_attn import check_pages, plan_lengths, tables_first
from llmbatch.kernels.interface import AttentionPlan, BatchLayout
from llmbatch.kernels.spec import AttentionSpec


class VarlenAttention:
    """Decodes and prefills in one launch (`PagedAttention`). Raises ImportError if torch cannot read pages."""

    name: AttentionName = "varlen"
    cascade = False

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise ImportError(f"the varlen_attn of torch {torch.__version__} reads no pages: install 2.12 or later")
        self._attend = varlen_attn

    def plan(self, layout: BatchLayout, spec: AttentionSpec, page_size: int) -> AttentionPlan:
        """Plan the lengths of the step's sequences. Raises ValueError if it has no kernel for `spec`."""
        if spec.sinks is not None or spec.softcap:
            raise ValueError("varlen_attn has neither sinks nor softcap: take attention='triton'")
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
        check_pages("varlen_attn", query, keys)
        tables, first, lengths, _ = tables_first(tensors)
        out = self._attend(
            query.view(len(query), spec.query_heads, spec.width),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            first,
            None,
            *plan.numbers,
            scale=spec.scale,
            window_size=(spec.window - 1 if spec.window else -1, 0),
            enable_gqa=spec.group > 1,
            seqused_k=lengths,
            block_table=tables,
        )
        assert isinstance(out, torch.Tensor)
        return out.reshape(query.shape)
