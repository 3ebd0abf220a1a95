"""What bounds a step: the best rate of a product, and the speed of memory, both measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch.nn import functional

from llmbatch.engine.cpu.linear import PackedLinear
from llmbatch.engine.cpu.memory import huge_pages
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.kernels.cpu.tiles import vector_ir
from llmbatch.perf_model.shape import ModelShape
from roofline.kinds import Kind

_SUMMED = 256 << 20  # bytes of a sum: some eight times what caches hold
_AHEAD = 16 << 10  # bytes between what is prefetched and what is read, as attention has it


def fastest(function: Callable[[], object], repeats: int, seconds: float = 0.2) -> float:
    """Seconds of the fastest of some calls: so many, and more while they take less than some seconds."""
    function()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < seconds and len(times) < 50 * repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def best_rate(dtype: torch.dtype, bits: int | None = None) -> float:
    """The operations a second of the fastest product here: torch's own or ours, of any of some shapes."""
    best = 0.0
    for rows, width in ((512, 1024), (2048, 1024), (1024, 2048), (2048, 2048)):
        x = torch.randn(rows, width).to(dtype)
        layer = torch.nn.Linear(width, width, bias=False, dtype=dtype)
        theirs = partial(functional.linear, x, layer.weight)
        if bits is not None:
            theirs = partial(torch._int_mm, x.to(torch.int8), layer.weight.detach().to(torch.int8))
        for product in (theirs, partial(PackedLinear(layer, bits=bits), x)):
            best = max(best, 2 * rows * width**2 / fastest(product, 5))
    return best


class Memory:
    """What sums over memory take: in order, and in pieces of so many bytes in random order."""

    def __init__(self, piece: int) -> None:
        self._pieces = huge_pages((2**30 // piece, piece // 4), np.float32)
        self._pieces.fill(1.0)
        self._order = np.random.default_rng(0).permutation(len(self._pieces))[:: 2**30 // _SUMMED]
        self._whole = torch.from_numpy(self._pieces[: len(self._order)])
        self._ahead = max(1, _AHEAD // piece)

    def rates(self) -> tuple[float, float]:
        """The bytes a second of both, at this moment: each is done once."""
        return _rate(self._whole.sum), _rate(partial(_sum_pieces, self._pieces, self._order, self._ahead))


def _rate(add: Callable[[], object]) -> float:
    """The bytes a second of a call that adds up `_SUMMED` bytes."""
    begun = time.perf_counter()
    add()
    return _SUMMED / (time.perf_counter() - begun)


@intrinsic
def _prefetch_line(_typing: Any, address: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        vector_ir.prefetch(builder, values[0], level=2)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.int64), build


_prefetch: Any = _prefetch_line


@numba.njit(parallel=True, fastmath=True)
def _sum_pieces(pieces: Any, order: Any, ahead: int) -> float:
    """Add up pieces in an order, each worker's while it prefetches the one that comes so many later."""
    total, lines = np.float32(0.0), (4 * pieces.shape[1] + 63) // 64
    workers = numba.get_num_threads()
    for worker in numba.prange(workers):
        own, end = np.float32(0.0), order.size * (worker + 1) // workers
        for i in range(order.size * worker // workers, end):
            piece, coming = pieces[order[i]], pieces[order[min(i + ahead, end - 1)]].ctypes.data
            for line in range(lines):
                _prefetch(np.int64(coming + 64 * line))
            for word in range(piece.size):
                own += piece[word]
        total += own
    return float(total)


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of a part of a step."""

    flops: float
    bytes: float

    def seconds(self, rate: float, bandwidth: float) -> float:
        """What bounds it."""
        return max(self.flops / rate, self.bytes / bandwidth)


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a step, and of which type it is."""

    flops: float
    layer_flops: float | None  # of the layers' products, if their weights are integers
    layer_bytes: float  # of a weight of theirs

    def bounds(self, loaded: LoadedModel, kind: Kind, bandwidth: float, scattered: float) -> tuple[float, float]:
        """Seconds of the roofline, and of the same in turn; `scattered` are the bytes a second of pages.

        Of rows that nobody samples from, the last layer has to compute keys and values alone.
        """
        size = loaded.dtype.itemsize
        shape = ModelShape.from_config(loaded.config, size)
        sampled = sum(kind.samples)
        rate = self.layer_flops or self.flops
        *specs, last = [loaded.attention[layer] for layer in sorted(loaded.attention)]
        left_out = shape.params / (len(specs) + 1) - 2 * last.heads * last.width * loaded.config.hidden_size
        layers = Work(
            2 * (shape.params * kind.tokens - left_out * (kind.tokens - sampled)), shape.params * self.layer_bytes
        )
        pairs = sum(4 * kind.pairs * spec.query_heads * spec.width for spec in specs)
        pairs += 4 * kind.sampled_keys * last.query_heads * last.width
        keys = kind.keys * bytes_per_token(specs, loaded.kv_type)
        keys += kind.sampled_keys * bytes_per_token([last], loaded.kv_type)
        head = Work(2 * shape.head_params * sampled, shape.head_params * size * (sampled > 0))
        attention = Work(pairs, keys)
        arithmetic = layers.flops / rate + (head.flops + attention.flops) / self.flops
        reading = (layers.bytes + head.bytes + attention.bytes) / bandwidth
        in_turn = layers.seconds(rate, bandwidth)
        in_turn += head.seconds(self.flops, bandwidth) + attention.seconds(self.flops, scattered)
        return max(arithmetic, reading), in_turn
