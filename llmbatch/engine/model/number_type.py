"""Which type of numbers a processor computes in fastest, and which rows bfloat16 weights meet: products are timed.

The products timed are those of layers: weights in panels, tiles of sums in registers (`llmbatch.kernels.cpu.products`).
A tile runs at the same rate whatever the sizes of a model are, so one size stands for all, and the figure is the
processor's. One thread computes them: several wait for each other, and where another process has a core they wait for
longer than a product takes.

Some processors multiply pairs of bfloat16 at half the rate of float32. There rows are widened to float32, and weights
in registers: that leaves most of the rate of float32, and half of its bytes (docs/decisions/0056). Must not import
torch: a process that compiles kernels asks, too.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Final, Literal

import numba
import numpy as np
from numpy.typing import NDArray

from llmbatch.choices import DType
from llmbatch.engine.model.outline import BFLOAT16_GAIN, GAIN_VERSIONS, LEAST_GAIN
from llmbatch.system.measurements import remembered

WIDENED: Final[np.dtype[Any]] = np.dtype(np.uint32)  # rows of float32, for weights of bfloat16
_PAIRS: Final[np.dtype[Any]] = np.dtype(np.uint16)
_WIDENED_GAIN: Final = "widened"  # the name of what is measured
_ROWS: Final = 120  # whole tiles
_WIDTH: Final = 1024
_RUNS: Final = 7


def fastest_type() -> Literal["bfloat16", "float32"]:
    """Return the type to compute in on this processor, measured once."""
    gain = remembered(BFLOAT16_GAIN, bfloat16_gain, *GAIN_VERSIONS)
    return "bfloat16" if gain > LEAST_GAIN else "float32"


def type_here(dtype: DType) -> tuple[DType, tuple[str, ...]]:
    """Return the type that a processor takes where `dtype` is asked for, and notes where it lacks what that needs."""
    from llmbatch.kernels.cpu.tiles.vector_ir import HAS_BFLOAT16, HAS_INT8

    if dtype == "int8" and not HAS_INT8:
        taken = fastest_type()
        return taken, (f"this processor cannot multiply int8 (it has no avx512_vnni): {taken} is taken instead",)
    if dtype == "bfloat16" and not HAS_BFLOAT16:
        return dtype, ("this processor cannot multiply bfloat16 (it has no avx512_bf16): float32 may be faster",)
    return dtype, ()


def bfloat16_gain() -> float:
    """Measure the seconds of a layer-sized product in float32 over those in bfloat16; 0 without its instructions."""
    from llmbatch.kernels.cpu.tiles.vector_ir import HAS_BFLOAT16

    return product_seconds(np.dtype(np.float32)) / product_seconds(bfloat16_rows()) if HAS_BFLOAT16 else 0.0


@cache
def bfloat16_rows() -> np.dtype[Any]:
    """Return the numbers that rows have in products of bfloat16, as `tile_code` takes them.

    They are pairs where a matrix unit takes these, and else what is faster, measured once a machine.
    """
    from llmbatch.kernels.cpu.tiles.matrix_unit import HAS_MATRICES

    if HAS_MATRICES:
        return _PAIRS
    return WIDENED if remembered(_WIDENED_GAIN, widened_gain, *GAIN_VERSIONS) > 1 else _PAIRS


def attention_rows() -> np.dtype[Any]:
    """Return the numbers that rows of bfloat16 have in attention, where vector instructions multiply them.

    Processors with a matrix unit multiply pairs by others slowly.
    """
    from llmbatch.kernels.cpu.tiles.matrix_unit import HAS_MATRICES

    return WIDENED if HAS_MATRICES else bfloat16_rows()


def widened_gain() -> float:
    """Measure the seconds of a product of bfloat16 over those with rows that were widened to float32."""
    return product_seconds(_PAIRS) / product_seconds(WIDENED)


def product_seconds(element: np.dtype[Any]) -> float:
    """Time a product of zeros in one thread: the fastest of some runs after one that compiles and warms up."""
    from llmbatch.kernels.cpu.products import STORE, multiply, rows_of_one_tile, tile_code
    from llmbatch.kernels.cpu.tiles.endings import COLUMNS

    rows: NDArray[Any] = np.zeros((_ROWS, _WIDTH), element)
    out = np.empty_like(rows)
    words = _WIDTH * (2 if element == WIDENED else rows.itemsize) // 4
    panels = np.zeros((_WIDTH // COLUMNS, words, COLUMNS), np.uint32)
    bias = np.zeros(_WIDTH, np.float32)
    times = []
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    for _ in range(1 + _RUNS):
        begun = time.perf_counter()
        multiply(
            tile_code(STORE, rows.dtype), rows.ctypes.data, rows.strides[0], 0, _ROWS,
            panels.ctypes.data, len(panels), words,
            out.ctypes.data, out.strides[0], COLUMNS * out.itemsize,
            bias.ctypes.data, 4 * COLUMNS, rows_of_one_tile(rows.dtype), 1,
        )  # fmt: skip  # arguments in groups
        times.append(time.perf_counter() - begun)
    numba.set_num_threads(threads)
    return min(times[1:])
