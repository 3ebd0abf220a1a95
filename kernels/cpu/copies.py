"""Copies of a few words with a stride, for compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmbatch.kernels.cpu import vector_ir as v

_COPIED: Final = ir.VectorType(v.INT32, 8)


@intrinsic
def _copy_rows(_typing: Any, target: Any, target_stride: Any, source: Any, source_stride: Any, rows: Any) -> Any:
    def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        target, target_stride, source, source_stride, rows = values

        def copy(index: Any) -> None:
            words = v.load(builder, builder.add(source, builder.mul(index, source_stride)), _COPIED)
            v.store(builder, words, builder.add(target, builder.mul(index, target_stride)))

        v.loop_over(builder, rows, copy)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(*[types.int64] * 5), build


# copy_rows(target, target_stride, source, source_stride, rows) copies 8 words of each row; all are bytes but the rows.
copy_rows: Final[Callable[..., None]] = _copy_rows
