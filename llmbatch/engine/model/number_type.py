"""Which type of numbers a processor computes in fastest: one product of either type is timed, as layers compute it.

Having the instructions of bfloat16 is not enough (docs/decisions/0006). The products timed are those of layers: weights
in panels, tiles of sums in registers (`llmbatch.kernels.cpu.products`). A tile runs at the same rate whatever the sizes
of a model are, so one size stands for all, and the figure is the processor's. One thread computes them: several wait
for each other, and where another process has a core they wait for longer than a product takes.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.model.outline import BFLOAT16_GAIN, GAIN_VERSIONS
from llmbatch.system.measurements import remembered

_ROWS: Final = 120  # whole tiles
_WIDTH: Final = 1024
_RUNS: Final = 7


def fastest_type() -> torch.dtype:
    """Return the type to compute in on this processor, measured once."""
    gain = remembered(BFLOAT16_GAIN, bfloat16_gain, *GAIN_VERSIONS)
    return torch.bfloat16 if gain > 1 else torch.float32


def bfloat16_gain() -> float:
    """Measure the seconds of a layer-sized product in float32 over those in bfloat16; 0 without its instructions."""
    if not torch.cpu._is_avx512_bf16_supported():
        return 0.0
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        return _product_seconds(np.float32) / _product_seconds(np.uint16)
    finally:
        numba.set_num_threads(threads)


def _product_seconds(element: type[np.generic]) -> float:
    """Time a product of zeros, the fastest of some runs after one that compiles and warms up."""
    from llmbatch.kernels.cpu.endings import COLUMNS
    from llmbatch.kernels.cpu.products import STORE, multiply, rows_of_one_tile, tile_code

    rows: NDArray[Any] = np.zeros((_ROWS, _WIDTH), element)
    out = np.empty_like(rows)
    words = _WIDTH * rows.itemsize // 4
    panels = np.zeros((_WIDTH // COLUMNS, words, COLUMNS), np.uint32)
    bias = np.zeros(_WIDTH, np.float32)
    times = []
    for _ in range(1 + _RUNS):
        begun = time.perf_counter()
        multiply(
            tile_code(STORE, rows.dtype), rows.ctypes.data, rows.strides[0], 0, _ROWS,
            panels.ctypes.data, len(panels), words,
            out.ctypes.data, out.strides[0], COLUMNS * out.itemsize,
            bias.ctypes.data, 4 * COLUMNS, panels.ctypes.data, 0, rows_of_one_tile(rows.dtype), 1,
        )  # fmt: skip  # arguments in groups
        times.append(time.perf_counter() - begun)
    return min(times[1:])
