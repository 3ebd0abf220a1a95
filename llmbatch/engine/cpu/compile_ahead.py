"""Compiles the functions that kernels call by address, in a process beside a job's, which compiles all else meanwhile.

They are two fifths of what a first job on a processor compiles, and need nothing of the others. `address_of` compiles
a function in one process at a time: who comes second finds it done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from llmbatch.compilation.decorators import code_folder, kept
from llmbatch.engine.model.number_type import WIDENED, attention_rows, bfloat16_rows
from llmbatch.kernels.cpu.attention import block_code
from llmbatch.kernels.cpu.products import STORE, tile_code, tile_codes
from llmbatch.kernels.cpu.tiles.matrix_unit import HAS_MATRICES
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_BFLOAT16

_BFLOAT16: Final[np.dtype[Any]] = np.dtype(np.uint16)
_ELEMENTS: Final[dict[str, np.dtype[Any]]] = {  # of what attention computes with
    "float32": np.dtype(np.float32),
    "bfloat16": _BFLOAT16,
    "int8": _BFLOAT16,
    "int4": _BFLOAT16,
}

_KEPT: Final[dict[str, np.dtype[Any]]] = {"bfloat16": _BFLOAT16, "int8": np.dtype(np.uint8)}  # in pages
_ROWS: Final[dict[str, np.dtype[Any]]] = {"int8": np.dtype(np.uint8), "int4": np.dtype(np.int8)}  # of products


def mark_of(dtype: str, kv_cache_dtype: str) -> Path | None:
    """Name the file that says that all of these is compiled; None if there is nothing, or nowhere to keep it."""
    known = kept() and (dtype in _ELEMENTS or dtype == "auto")
    return code_folder() / f"kernels-{dtype}-{kv_cache_dtype}" if known else None


def main(dtype: str, kv_cache_dtype: str) -> None:
    """Compile what computing in those types needs, in the order in which a job asks for it, and leave a mark."""
    mark = mark_of(dtype, kv_cache_dtype)
    if mark is None or mark.exists():
        return
    if dtype == "auto":  # which is faster is measured first
        dtype = "bfloat16" if HAS_BFLOAT16 else "float32"
        tile_code(STORE, _ELEMENTS["float32"])
    if dtype != "float32" and not HAS_MATRICES:  # both kinds of rows are timed
        for element in (_BFLOAT16, WIDENED):
            tile_code(STORE, element)
    tile_codes(_ELEMENTS[dtype] if dtype == "float32" else bfloat16_rows())
    if dtype in _ROWS:
        tile_codes(_ROWS[dtype])
    element = _ELEMENTS[dtype]
    is_widened = dtype == "bfloat16" and bfloat16_rows() == WIDENED
    rows = element if dtype == "float32" else attention_rows()
    result = _ELEMENTS["float32"] if is_widened else element
    block_code(element, result, _KEPT.get(kv_cache_dtype, element), rows)
    mark.touch()
