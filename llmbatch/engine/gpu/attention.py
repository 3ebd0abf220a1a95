"""Attention of a step on a device: its pages, and the layers' calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.gpu.batch import Kind
from llmbatch.engine.gpu.execution import Sequential
from llmbatch.engine.model.ops import pack_heads
from llmbatch.kernels.interface import AttentionPlan, BatchLayout, PagedAttention
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.kernels.triton import fused as triton_fused
from llmbatch.kernels.triton.backend import TritonAttention

PAGE_SIZE: Final = 16
_FILLED: Final = 1024  # pages, at a time


class GpuKVCache:
    """The KV memory of all layers: `num_pages` pages of `page_size` tokens, a power of two.

    Keys and values of a layer are [pages, heads, page size, width] each, of `dtype`. Layers with windows have
    `window_pages` if there are any, else pages like all others. Kernels may read window pages that nobody has written,
    and not use them: they are zeros at first.
    """

    def __init__(
        self,
        specs: dict[int, AttentionSpec],
        *,
        num_pages: int,
        window_pages: int = 0,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        self.specs = specs
        self.num_pages = num_pages
        self.window_pages = window_pages
        self.page_size = page_size

        def make(spec: AttentionSpec) -> torch.Tensor:
            new = torch.zeros if self.in_windows(spec) else torch.empty
            pages = window_pages if self.in_windows(spec) else num_pages
            return new((pages, spec.heads, page_size, spec.width), dtype=dtype, device=device)

        self.keys: dict[int, torch.Tensor] = {layer: make(spec) for layer, spec in specs.items()}
        self.values: dict[int, torch.Tensor] = {layer: make(spec) for layer, spec in specs.items()}

    def in_windows(self, spec: AttentionSpec) -> bool:
        """Tell whether a layer's KV is in window pages."""
        return self.window_pages > 0 and spec.window > 0

    def fill(self) -> None:
        """Fill the pages with normal random numbers."""
        # A generator of its own: a recording that has failed leaves torch's own unusable.
        generator = torch.Generator(self._device).manual_seed(0)
        for tensor in (*self.keys.values(), *self.values.values()):
            for first in range(0, len(tensor), _FILLED):
                pages = tensor[first : first + _FILLED]  # copied, since e4m3 cannot be drawn
                pages.copy_(torch.randn(pages.shape, device=self._device, generator=generator))

    @property
    def spare(self) -> int:
        """The first place of the last page, where there is one to spare."""
        return (self.num_pages - 1) * self.page_size

    @property
    def window_spare(self) -> int:
        """The first place of the last window page, where there is one to spare."""
        return (self.window_pages - 1) * self.page_size

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copy pages, int32 [copies, 2]: the first of each pair to the second, in all layers.

        There must be no window pages: with them sequences do not fork (`llmbatch.scheduler.forks`).
        """
        assert self.window_pages == 0, "window pages are not copied"
        there = torch.from_numpy(pages.T.astype(np.int64)).to(next(iter(self.keys.values())).device, non_blocking=True)
        for tensor in (*self.keys.values(), *self.values.values()):
            numbers = tensor.view(torch.uint8)  # e4m3 cannot be indexed
            numbers[there[1]] = numbers[there[0]]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))


class GpuAttention:
    """Attention of a step (`llmbatch.engine.model.ops.AttentionContext`).

    `plans` are those of the distinct layers (`AttentionSpec.kind`), on the device like `places` int32 [tokens]: the
    place of each token's keys and values, page times page size plus its place in the page; `window_places` likewise in
    window pages. Each layer's attention, which begins with writing these, is passed to `queue`.
    """

    def __init__(
        self,
        pages: GpuKVCache,
        backend: PagedAttention,
        plans: dict[Kind, tuple[AttentionPlan, list[torch.Tensor]]],
        places: torch.Tensor,
        window_places: torch.Tensor,
        queue: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        self._pages, self._backend, self._plans, self._places = pages, backend, plans, places
        self._window_places, self._queue = window_places, queue

    def run(
        self,
        spec: AttentionSpec,
        packed: torch.Tensor,
        *,
        cosine: torch.Tensor | None = None,
        sine: torch.Tensor | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """Attend in one layer, after writing its keys and values."""
        keys, values = self._pages.keys[spec.layer], self._pages.values[spec.layer]
        plan, tensors = self._plans[spec.kind]
        places = self._window_places if self._pages.in_windows(spec) else self._places

        def attention() -> torch.Tensor:
            query = packed.new_empty(len(packed), spec.query_heads * spec.width)
            triton_fused.rotate_and_store(
                packed, query, cosine, sine, query_norm, key_norm, epsilon, places, keys, values
            )
            return self._backend.attend(spec, query, keys, values, plan, tensors)

        return self._queue(attention)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
    ) -> torch.Tensor:
        """Attend for a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        spec = self._pages.specs[module.layer_idx]
        packed = pack_heads(query, key, value)
        return self.run(spec, packed).view(1, len(packed), -1, spec.width)[..., : value.shape[-1]]


def plan_layers(
    pages: GpuKVCache,
    layout: BatchLayout,
    window_tables: NDArray[np.int32] | None,
    plan: Callable[[BatchLayout, AttentionSpec], AttentionPlan],
) -> dict[Kind, AttentionPlan]:
    """Plan a step for each kind of layer; those in window pages have the same layout with `window_tables`."""
    windows = layout if window_tables is None else replace(layout, tables=window_tables)
    kinds = {spec.kind: spec for spec in pages.specs.values()}
    return {kind: plan(windows if pages.in_windows(spec) else layout, spec) for kind, spec in kinds.items()}


class GpuOps:
    """Kernels for a device (`llmbatch.engine.model.ops.ModelOps`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """Apply RMSNorm."""
        triton_fused.normalize(x, weight, epsilon, out)

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        """Apply a gated activation."""
        triton_fused.gate(x, activation, out)

    def probe_step(self, specs: dict[int, AttentionSpec], dtype: torch.dtype, tokens: int) -> GpuAttention:
        """Make a step of one sequence."""
        zero = np.zeros(1, np.int32)
        pages = GpuKVCache(specs, num_pages=1, page_size=PAGE_SIZE, dtype=dtype, device=self._device)
        layout = BatchLayout(tables=zero[None], slots=zero, starts=zero, counts=zero + tokens, decodes=0)
        backend = TritonAttention(self._device)
        plans = plan_layers(pages, layout, None, lambda given, spec: backend.plan(given, spec, PAGE_SIZE))
        there = {
            kind: (plan, [torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in plan.uploaded])
            for kind, plan in plans.items()
        }
        places = torch.arange(tokens, dtype=torch.int32, device=self._device)
        return GpuAttention(pages, backend, there, places, places, Sequential().attend)
