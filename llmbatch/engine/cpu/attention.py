"""Attention of a step on the processor: prepared once a step, used by every layer."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.model.ops import pack_heads
from llmbatch.kernels.chunks import Pieces, cut_at_chunks
from llmbatch.kernels.cpu import fused
from llmbatch.kernels.cpu.attention import attend, cut_blocks
from llmbatch.kernels.cpu.tile import LANES
from llmbatch.kernels.spec import AttentionSpec

_NONE = np.empty(0, np.float32)

# What `attend` takes of a step: tables, slots, starts, counts, first rows, and blocks.
_Plan = tuple[Any, Any, Any, Any, Any, Any, Any, Any]


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """View the memory of a CPU tensor as kernels see it: float32, or uint16 for bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class CpuKVCache:
    """The KV memory of all layers: `num_pages` pages of `page_size` tokens.

    Memory is claimed from the system when it is first written, not when it is made.
    """

    def __init__(self, specs: dict[int, AttentionSpec], *, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.specs = specs
        self.num_pages = num_pages
        self.page_size = page_size
        element = np.uint16 if dtype == torch.bfloat16 else np.float32
        self.keys: dict[int, NDArray[Any]] = {}
        self.values: dict[int, NDArray[Any]] = {}
        for layer, spec in specs.items():
            padded = -(-spec.width // LANES) * LANES
            shape = (num_pages, spec.heads, spec.width, page_size)
            # A vector to spare: lanes beyond the last page's end are read, and not used.
            self.keys[layer] = np.empty(math.prod(shape) + LANES, element)[:-LANES].reshape(shape)
            self.values[layer] = np.empty((num_pages, spec.heads, page_size, padded), element)


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
    ) -> None:
        self._pages = pages
        self._step = Pieces(tables, slots, starts, counts)
        self._token_pages, self._token_offsets = token_pages, token_offsets
        self._plans: dict[tuple[int, ...], _Plan] = {}

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
        rows = as_array(packed)
        unrotated = np.empty((len(rows), 0), rows.dtype)
        fused.rotate_and_store(
            rows,
            unrotated if cosine is None else as_array(cosine),
            unrotated if sine is None else as_array(sine),
            _NONE if query_norm is None else query_norm.numpy(),
            _NONE if key_norm is None else key_norm.numpy(),
            epsilon,
            self._token_pages,
            self._token_offsets,
            keys,
            values,
        )
        key = (*spec.kind, spec.chunk)
        plan = self._plans.get(key) or self._plans.setdefault(key, self._plan(spec))
        out = torch.empty(len(rows), spec.query_heads * spec.width, dtype=packed.dtype)
        attend(
            rows, as_array(out), keys, values, *plan, spec.group, spec.scale, spec.window, spec.softcap,
            _NONE if spec.sinks is None else spec.sinks.numpy(),
        )  # fmt: skip  # arguments in groups
        return out

    def _plan(self, spec: AttentionSpec) -> _Plan:
        """Find the sequences that layers like `spec` attend in, and cut them into blocks."""
        step = cut_at_chunks(self._step, spec.chunk, self._pages.page_size) if spec.chunk else self._step
        rows = np.cumsum(step.counts, dtype=np.int64) - step.counts
        workers = numba.get_num_threads()
        return *step, rows, *cut_blocks(step.starts, step.counts, spec.group, spec.window, workers, spec.heads)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
    ) -> torch.Tensor:
        """Attend for a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        spec = self._pages.specs[module.layer_idx]
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
        """Make a step of one sequence."""
        zero = np.zeros(1, np.int32)
        return CpuAttention(
            CpuKVCache(specs, num_pages=1, page_size=16, dtype=dtype),
            tables=zero[None],
            slots=zero,
            starts=zero,
            counts=zero + tokens,
            token_pages=np.zeros(tokens, np.int32),
            token_offsets=np.arange(tokens, dtype=np.int32),
        )
