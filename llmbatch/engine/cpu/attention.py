"""Attention of a step on the processor: prepared once a step, used by every layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.cpu.memory import as_array, huge_pages
from llmbatch.engine.model.number_type import attention_rows
from llmbatch.engine.model.ops import pack_heads
from llmbatch.engine.model.outline import KVType
from llmbatch.kernels.chunks import Pieces, cut_at_chunks
from llmbatch.kernels.cpu import fused
from llmbatch.kernels.cpu.attention import attend
from llmbatch.kernels.cpu.blocks import GROUPS, Blocks, cut_blocks
from llmbatch.kernels.cpu.layout import Pages, page_shape
from llmbatch.kernels.spec import AttentionSpec

_NONE = np.empty(0, np.float32)
_ELEMENTS: Final[dict[str, type[np.generic]]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.uint8}
_SPARE: Final = 8  # words behind the last page, which are read and not used


class CpuKVCache:
    """The KV memory of all layers: `num_pages` pages of `page_size` tokens, and `window_pages` of layers with windows.

    Memory is claimed from the system when it is first written, not when it is made. Layers whose heads are alike lie in
    one array, [layers, *page_shape], apart where they have windows and window pages. Its numbers are those that are
    computed with, or smaller ones. Without window pages the layers with windows have pages like all others.
    """

    def __init__(
        self,
        specs: dict[int, AttentionSpec],
        *,
        num_pages: int,
        page_size: int,
        kv_type: KVType,
        window_pages: int = 0,
    ) -> None:
        self.specs = specs
        self.num_pages = num_pages
        self.windowed = window_pages > 0
        self.page_size = page_size
        element, pack = _ELEMENTS[kv_type.name], 4 // kv_type.itemsize
        self.memory: dict[tuple[int, int, bool], NDArray[Any]] = {}  # by heads, their width, whether in window pages
        self.layers: dict[int, Pages] = {}
        for heads, width, in_windows in {self._kind(spec) for spec in specs.values()}:
            alike = [layer for layer, spec in specs.items() if self._kind(spec) == (heads, width, in_windows)]
            pages = window_pages if in_windows else num_pages
            shape = (len(alike), *page_shape(pages, heads, width, page_size, pack))
            # Words to spare: those beyond the last page's end are read, and not used.
            memory = huge_pages((math.prod(shape) + _SPARE * pack,), element)[: -_SPARE * pack].reshape(shape)
            self.memory[heads, width, in_windows] = memory
            self.layers |= {layer: Pages(memory[i], width, page_size) for i, layer in enumerate(alike)}

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copy pages, int32 [copies, 2]: the first of each pair to the second, in all layers.

        There must be no window pages: with them sequences do not fork (`llmbatch.scheduler.forks`).
        """
        assert not self.windowed, "window pages are not copied"
        for memory in self.memory.values():
            memory[:, pages[:, 1]] = memory[:, pages[:, 0]]

    def in_windows(self, spec: AttentionSpec) -> bool:
        """Tell whether a layer's KV is in window pages."""
        return self.windowed and spec.window > 0

    def _kind(self, spec: AttentionSpec) -> tuple[int, int, bool]:
        return spec.heads, spec.width, self.in_windows(spec)


class AttentionBlocks(NamedTuple):
    """What `attend` takes of a step."""

    tables: NDArray[np.int32]
    slots: NDArray[np.int32]
    blocks: Blocks


class StepArrays(NamedTuple):
    """A step as attention takes it."""

    tables: NDArray[np.int32]
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    token_pages: NDArray[np.int32]  # [2, tokens]
    token_offsets: NDArray[np.int32]
    window_tables: NDArray[np.int32] | None


class CpuAttention:
    """Attention of a step (`llmbatch.engine.model.ops.AttentionContext`)."""

    def __init__(
        self,
        pages: CpuKVCache,
        *,
        tables: NDArray[np.int32],
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        token_pages: NDArray[np.int32],
        token_offsets: NDArray[np.int32],
        window_tables: NDArray[np.int32] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Take a step; `token_pages` are [2, tokens], pages and window pages, and `window_tables` those of the latter.

        `between` is called between two layers, and may execute other steps.
        """
        self.pages = pages
        self.between = between
        self.token_pages, self.token_offsets = token_pages, token_offsets
        self.arrays = StepArrays(tables, slots, starts, counts, token_pages, token_offsets, window_tables)
        self._step = Pieces(tables, slots, starts, counts)
        self._windows = self._step if window_tables is None else self._step._replace(tables=window_tables)
        self._plans: dict[tuple[int, ...], AttentionBlocks] = {}

    @classmethod
    def of(cls, pages: CpuKVCache, arrays: StepArrays) -> CpuAttention:
        """Take the step of another process."""
        return cls(pages, **arrays._asdict())

    def plan(self, spec: AttentionSpec) -> AttentionBlocks:
        """Find the sequences that layers like `spec` attend in, and cut them into blocks, once for all such layers."""
        key = (spec.group, spec.heads, spec.window, spec.chunk)
        return self._plans.get(key) or self._plans.setdefault(key, self._make_plan(spec, self._pieces(spec)))

    def plan_of_rows(self, spec: AttentionSpec, rows: NDArray[np.int64]) -> AttentionBlocks:
        """Cut some rows of the step into blocks, each of them alone, as decodes are."""
        step = self._pieces(spec)
        ends = np.cumsum(step.counts)
        of = np.searchsorted(ends, rows, side="right")
        positions = (step.starts[of] + step.counts[of] + rows - ends[of]).astype(np.int32)
        return self._make_plan(spec, Pieces(step.tables, step.slots[of], positions, np.ones_like(positions)))

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
        if self.between is not None and spec.layer > 0:
            self.between()
        pages = self.pages.layers[spec.layer]
        rows = as_array(packed)
        unrotated = np.empty((len(rows), 0), rows.dtype)
        fused.rotate_and_store(
            rows,
            spec.query_heads,
            unrotated if cosine is None else as_array(cosine),
            unrotated if sine is None else as_array(sine),
            _NONE if query_norm is None else query_norm.numpy(),
            _NONE if key_norm is None else key_norm.numpy(),
            epsilon,
            self.token_pages[int(self.pages.in_windows(spec))],
            self.token_offsets,
            pages,
        )
        out = torch.empty(len(rows), spec.query_heads * spec.width, dtype=packed.dtype)
        attend(
            rows, as_array(out), pages, *self.plan(spec), spec.group, spec.scale, spec.window, spec.softcap,
            _NONE if spec.sinks is None else spec.sinks.numpy(),
            rows=attention_rows() if rows.dtype == np.uint16 else None,
        )  # fmt: skip  # arguments in groups
        return out

    def _pieces(self, spec: AttentionSpec) -> Pieces:
        return self._windows if self.pages.in_windows(spec) else self._step

    def _make_plan(self, spec: AttentionSpec, step: Pieces) -> AttentionBlocks:
        if spec.chunk:
            step = cut_at_chunks(step, spec.chunk, self.pages.page_size)
        blocks = cut_blocks(
            *step, self.pages.page_size, spec.group, spec.window, numba.get_num_threads(), spec.heads, GROUPS
        )
        return AttentionBlocks(step.tables, step.slots, blocks)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
    ) -> torch.Tensor:
        """Attend for a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        spec = self.pages.specs[module.layer_idx]
        packed = pack_heads(query, key, value)
        return self.run(spec, packed).view(1, len(packed), -1, spec.width)[..., : value.shape[-1]]


class CpuOps:
    """Kernels for the processor (`llmbatch.engine.model.ops.ModelOps`)."""

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """Apply RMSNorm."""
        fused.normalize(as_array(x), weight.numpy(), epsilon, as_array(out))

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        """Apply a gated activation."""
        fused.gate(as_array(x), activation, as_array(out))

    def probe_step(self, specs: dict[int, AttentionSpec], dtype: torch.dtype, tokens: int) -> CpuAttention:
        """Make a step of one sequence, in one page."""
        zero, whole = np.zeros(1, np.int32), KVType(str(dtype).removeprefix("torch."), dtype.itemsize)
        return CpuAttention(
            CpuKVCache(specs, num_pages=1, page_size=max(16, tokens), kv_type=whole),
            tables=zero[None],
            slots=zero,
            starts=zero,
            counts=zero + tokens,
            token_pages=np.zeros((2, tokens), np.int32),
            token_offsets=np.arange(tokens, dtype=np.int32),
        )
