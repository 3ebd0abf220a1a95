"""What the attention of one step needs to know, made once and read by every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.kernels.attention import attend, cut_blocks
from llmbatch.kernels.fused import rotate_and_store
from llmbatch.kernels.tile import LANES

_NO_NORM = np.empty(0, np.float32)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as kernels see it: float32, or uint16 for bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer, as the model calls it."""

    layer: int
    query_heads: int
    heads: int  # of keys and values
    width: int  # of a head
    scale: float
    window: int  # keys a query sees, itself included; 0: all
    softcap: float  # 0: none

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.heads


class Pages:
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


class StepAttention:
    """Writes a step's keys and values into pages and attends over them, layer by layer."""

    def __init__(
        self,
        pages: Pages,
        *,
        tables: NDArray[np.int32],
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        token_pages: NDArray[np.int32],
        token_offsets: NDArray[np.int32],
    ) -> None:
        self._pages = pages
        self._tables, self._slots, self._starts, self._counts = tables, slots, starts, counts
        self._token_pages, self._token_offsets = token_pages, token_offsets
        self._rows = np.cumsum(counts, dtype=np.int64) - counts
        self._blocks: dict[tuple[int, int, int], tuple[Any, Any, Any]] = {}

    def run(
        self,
        spec: AttentionSpec,
        packed: torch.Tensor,
        *,
        cosine: torch.Tensor | None = None,
        sine: torch.Tensor | None = None,
        query_norm: NDArray[np.float32] = _NO_NORM,
        key_norm: NDArray[np.float32] = _NO_NORM,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """Attention output [tokens, query heads * width] of `packed` (see `rotate_and_store`), which it changes."""
        keys, values = self._pages.keys[spec.layer], self._pages.values[spec.layer]
        rows = as_array(packed)
        unrotated = np.empty((len(rows), 0), rows.dtype)
        rotate_and_store(
            rows,
            unrotated if cosine is None else as_array(cosine),
            unrotated if sine is None else as_array(sine),
            query_norm,
            key_norm,
            epsilon,
            self._token_pages,
            self._token_offsets,
            keys,
            values,
        )
        key = (spec.group, spec.window, spec.heads)
        if key not in self._blocks:
            workers = numba.get_num_threads()
            self._blocks[key] = cut_blocks(self._starts, self._counts, spec.group, spec.window, workers, spec.heads)
        out = torch.empty(len(rows), spec.query_heads * spec.width, dtype=packed.dtype)
        attend(
            rows, as_array(out), keys, values, self._tables, self._slots, self._starts, self._counts, self._rows,
            *self._blocks[key], spec.group, spec.scale, spec.window, spec.softcap,
        )  # fmt: skip
        return out

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        packed = torch.cat((query[0], key[0], value[0])).transpose(0, 1)  # [tokens, heads of all three, width]
        spec = self._pages.specs[module.layer_idx]
        return self.run(spec, packed.reshape(len(packed), -1)).view(1, len(packed), -1, spec.width)
