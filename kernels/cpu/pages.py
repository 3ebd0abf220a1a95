"""Reads pages for attention: where they are, copied side by side, or widened.

Pages may hold smaller numbers than attention multiplies: bfloat16 for float32, or int8 for either. Those of a tile are
widened into the arrays that others are copied into, once for all rows that attend to it. All numbers of a register of
words are converted at once, and those of the next tile are prefetched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.layout import INT8_PACK, UNIT, WIDTH_MULTIPLE
from llmbatch.kernels.cpu.tiles import vector_ir as v
from llmbatch.kernels.cpu.tiles.matrix_unit import STEP

_COPIED: Final = ir.VectorType(v.INT32, 8)
_LINE: Final = ir.VectorType(v.INT32, 16)
_PACKS: Final = {v.FLOAT32: 1, v.BFLOAT16: 2, v.INT8: INT8_PACK}  # elements of a word


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


@intrinsic
def _copy_unit(
    _typing: Any, target: Any, target_stride: Any, source: Any, source_stride: Any, words: Any, ahead: Any,
    to_values: Any, values: Any, lines: Any, values_ahead: Any,
) -> Any:  # fmt: skip  # arguments in groups
    def build(_context: Any, builder: Any, _sig: Any, given: Any) -> Any:
        target, target_stride, source, source_stride, words, ahead, to_values, values, lines, values_ahead = given

        def copy_word(index: Any) -> None:
            shift = builder.mul(index, source_stride)
            v.prefetch(builder, builder.add(ahead, shift), level=2)
            moved = v.load(builder, builder.add(source, shift), _COPIED)
            v.store(builder, moved, builder.add(target, builder.mul(index, target_stride)))

        def copy_line(index: Any) -> None:
            shift = builder.mul(index, v.constant(64))
            v.prefetch(builder, builder.add(values_ahead, shift), level=2)
            moved = v.load(builder, builder.add(values, shift), _LINE)
            v.store(builder, moved, builder.add(to_values, shift))

        v.loop_over(builder, words, copy_word)
        v.loop_over(builder, lines, copy_line)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(*[types.int64] * 10), build


# copy_unit(target, target_stride, source, source_stride, words, ahead, to_values, values, lines, values_ahead) copies
# so many words of 8 keys, and lines of their values; it prefetches as much from `ahead` and `values_ahead` on.
copy_unit: Final[Callable[..., None]] = _copy_unit


@compiled(nogil=True, counted=False)
def _page_at(pages: Any, page: int, head: int) -> int:
    """Return the address of a page of a head."""
    memory = pages.memory
    return int(memory.ctypes.data + ((page * memory.shape[1] + head) * memory.shape[2]) * 4)


@compiled(nogil=True, counted=False)
def _values_begin(pages: Any) -> int:
    """Return the words of a page before its values."""
    pack = pages.memory.shape[3]
    return int((pages.width // pack + (pack == INT8_PACK)) * pages.size)


@compiled(nogil=True, counted=False)
def _padded_width(pages: Any) -> int:
    """Return the values of a row that are not scales."""
    return int((pages.width + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE)


@compiled(nogil=True, counted=False)
def values_width(pages: Any) -> int:
    """Return the words of a row of values."""
    pack = pages.memory.shape[3]
    return int(_padded_width(pages) + INT8_PACK * (pack == INT8_PACK))


@compiled(nogil=True, counted=False)
def gather_keys(pages: Any, tables: Any, slot: int, head: int, low: int, high: int, tile: int, stride: int) -> None:
    """Copy the words of the keys [low, high) side by side: [words of a key, keys]."""
    size, words = pages.size, pages.width // pages.memory.shape[3]
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        source = _page_at(pages, tables[slot, key // size], head) + 4 * offset
        for j in range(0, run, UNIT):  # the last may be of fewer than 8 keys: the next page's overwrite the rest
            copy_rows(tile + 4 * (key - low + j), stride, source + 4 * j, 4 * size, words)
        key += run


@compiled(nogil=True, counted=False)
def gather_values(pages: Any, tables: Any, slot: int, head: int, low: int, high: int, tile: Any) -> None:
    """Copy the values [low, high) as rows of words, each of as many tokens as a word has elements."""
    size, pack = pages.size, pages.memory.shape[3]
    begin, width, stride = _values_begin(pages), values_width(pages), tile.shape[1]
    target = tile.ctypes.data
    key = low
    while key < high:
        offset = key % size
        run = min(size - offset, high - key)
        source = _page_at(pages, tables[slot, key // size], head) + 4 * (begin + offset // pack * width)
        first, rows = (key - low) // pack, (run + pack - 1) // pack
        if size % pack != 0:
            _gather_halves(pages, tables[slot, key // size], head, offset, run, key - low, tile)
        elif width == stride:
            copy_rows(target + 4 * first * stride, 32, source, 32, rows * width // UNIT)
        else:
            for row in range(rows):
                copy_rows(target + 4 * (first + row) * stride, 32, source + 4 * row * width, 32, width // UNIT)
        key += run


@compiled(nogil=True, counted=False)
def _gather_halves(pages: Any, page: int, head: int, offset: int, run: int, place: int, tile: Any) -> None:
    """Copy values of a page of an odd number of tokens, whose words are not words of the tile."""
    begin, width, pack = _values_begin(pages), values_width(pages), pages.memory.shape[3]
    source = pages.memory[page, head]
    for t in range(run):
        target, half = tile[(place + t) // pack], np.uint32(16 * ((place + t) % pack))
        row = begin + (offset + t) // pack * width
        for d in range(width):
            element = np.uint32(source[row + d, (offset + t) % pack])
            target[d] = element << half if half == 0 else target[d] | element << half


@compiled(nogil=True, counted=False)
def clear_last(tile: Any, keys: int) -> None:
    """Clear the values beside the last of an odd number, which were not written: 0 times NaN is NaN."""
    last = tile[keys // 2]
    for d in range(last.size):
        last[d] &= np.uint32(0xFFFF)


@compiled(nogil=True, counted=False)
def clear_rows(tile: Any, keys: int) -> None:
    """Clear the values behind so many, as far as the matrix unit reads: they may hold NaN."""
    pairs = (keys + 1) // 2
    for row in range(pairs, (pairs + STEP - 1) // STEP * STEP):
        for d in range(tile.shape[1]):
            tile[row, d] = np.uint32(0)


@compiled(nogil=True, counted=False)
def copy_units(pages: Any, keys: int, units: Any, place: int, coming: int, tile: Any, values: Any) -> None:
    """Copy so many keys and their values, found by `find_units`, as `gather_keys` and `gather_values` do.

    Those of `coming` are prefetched. Pages hold whole units, of words of two elements, and rows as long as the tile's.
    """
    size = 2 * UNIT * values.shape[1]  # bytes of a unit's values
    for unit in range((keys + UNIT - 1) // UNIT):
        copy_unit(
            tile.ctypes.data + 4 * UNIT * unit, 4 * tile.shape[1], units[place, 0, unit], 4 * pages.size,
            pages.width // 2, units[coming, 0, unit],
            values.ctypes.data + size * unit, units[place, 1, unit], size // 64, units[coming, 1, unit],
        )  # fmt: skip  # arguments in groups
    if keys % 2 == 1:
        clear_last(values, keys)


@compiled(nogil=True, counted=False)
def find_units(
    pages: Any, tables: Any, slot: int, head: int, low: int, high: int, units: Any, place: int
) -> None:  # fmt: skip  # arguments in groups
    """Write the addresses of the keys [low, high) and of their values, in units of 8; the last stands for the rest.

    They go to `units`[place], [2, units of a tile].
    """
    size, pack = pages.size, pages.memory.shape[3]
    begin, row = 4 * _values_begin(pages), 4 * values_width(pages) * (UNIT // pack)
    page, offset = low // size, low % size
    start = _page_at(pages, tables[slot, page], head)
    for unit in range(units.shape[2]):
        units[place, 0, unit] = start + 4 * offset
        units[place, 1, unit] = start + begin + offset // UNIT * row
        if low + (unit + 1) * UNIT < high:
            offset += UNIT
            if offset == size:
                page, offset = page + 1, 0
                start = _page_at(pages, tables[slot, page], head)


def _make_widener(*, of_keys: bool) -> Callable[..., None]:
    """Make code that widens rows of words, each of `registers`, as the type of `like` has them.

    Row i becomes as many rows as a word of it has of the target's, from i times that on. In a unit of keys a lane is a
    token: its scale is in the same lane of one more row. In one of values each part of a word is a token.
    """

    @intrinsic
    def widen(
        _typing: Any, kept: Any, like: Any, source: Any, stride: Any, rows: Any, registers: Any, target: Any,
        target_stride: Any, ahead: Any,
    ) -> Any:  # fmt: skip  # arguments in groups
        small, large = v.element_of(kept), v.element_of(like)
        ratio = _PACKS[small] // _PACKS[large]

        def build(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
            _, _, source, stride, rows, registers, target, target_stride, ahead = values

            def scale_of(row: Any, part: int) -> Any:
                if of_keys:
                    return v.load(builder, builder.add(source, builder.mul(rows, stride)), v.FLOATS)
                behind = builder.add(builder.mul(registers, v.constant(4 * v.LANES)), v.constant(4 * part))
                return v.spread(builder, v.load(builder, builder.add(row, behind), v.FLOAT))

            def widen_row(index: Any) -> None:
                begin = builder.mul(index, stride)
                row = builder.add(source, begin)
                scales = [scale_of(row, part) for part in range(_PACKS[small])] if small == v.INT8 else None

                def widen_register(register: Any) -> None:
                    across = builder.mul(register, v.constant(4 * v.LANES))
                    v.prefetch(builder, builder.add(builder.add(ahead, begin), across), level=2)
                    words = v.load(builder, builder.add(row, across), v.WORDS)
                    made = v.join_elements(builder, v.split_elements(builder, words, small, scales), large)
                    for i, word in enumerate(made):
                        place = builder.add(builder.mul(index, v.constant(ratio)), v.constant(i))
                        at = builder.add(target, builder.mul(place, target_stride))
                        v.store(builder, word, builder.add(at, across))

                v.loop_over(builder, registers, widen_register)

            if ratio > 1:
                v.loop_over(builder, rows, widen_row)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.void(kept, like, *[types.int64] * 7), build

    made: Callable[..., None] = widen
    return made


_widen_keys: Final = _make_widener(of_keys=True)
_widen_values: Final = _make_widener(of_keys=False)


@compiled(nogil=True, counted=False)
def widen_tile(pages: Any, like: Any, keys: int, units: Any, place: int, coming: int, tile: Any, values: Any) -> None:
    """Widen so many keys and their values, found by `find_units`; those of `coming` are prefetched.

    `tile` and `values` get them as `gather_keys` and `gather_values` copy them, in numbers of `like`. Pages hold whole
    units.
    """
    pack, key_stride, value_stride = pages.memory.shape[3], 4 * tile.shape[1], 4 * values.shape[1]
    words, padded = pages.width // pack, _padded_width(pages)
    unit_rows = UNIT * like.itemsize // 4  # of values
    for unit in range((keys + UNIT - 1) // UNIT):
        _widen_keys(
            pages.memory, like, units[place, 0, unit], 4 * pages.size, words, 1,
            tile.ctypes.data + 4 * UNIT * unit, key_stride, units[coming, 0, unit],
        )  # fmt: skip  # arguments in groups
        _widen_values(
            pages.memory, like, units[place, 1, unit], 4 * values_width(pages), UNIT // pack, padded // v.LANES,
            values.ctypes.data + unit_rows * unit * value_stride, value_stride, units[coming, 1, unit],
        )  # fmt: skip  # arguments in groups
