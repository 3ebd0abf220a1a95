"""A 64-bit hash of each row's values, the same however the table is chunked, sliced or encoded.

A resumed job asks whether a row is the one it has answered, so equal values must hash equal whatever way the file was
written: string, large_string and string_view, plain and dictionary encoded, int32 and int64, 1 and 1.0, one chunk or
many. Bytes under a null do not count, nor does the order of columns or of a struct's fields. A null adds nothing to the
hash of its row, so a column that comes with appended rows leaves earlier rows' hashes unchanged. Numbers that are not
finite, which JSON writes as null, add nothing either, nor does the line that a row was read from: other columns hold
the same.

Bytes are mixed eight at a time by the steps of xxHash64. The hash finds changes made by chance, not by malice.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.io.json_values import LINE

_A = np.uint64(0x9E3779B185EBCA87)
_B = np.uint64(0xC2B2AE3D27D4EB4F)
_C = np.uint64(0x165667B19E3779F9)
_D = np.uint64(0x85EBCA77C2B2AE63)
_MINUS_ZERO = np.uint64(1 << 63)  # the bits of -0.0, which no integer is
_WHOLE = 2.0**63  # doubles below it may be whole numbers of int64


def hash_rows(table: pa.Table) -> NDArray[np.uint64]:
    """Hash each row, uint64 [rows], from the names and values of its columns that are not null."""
    rows = np.zeros(table.num_rows, np.uint64)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name == LINE:
            continue
        start = 0
        for chunk in column.chunks:
            _add(rows[start : start + len(chunk)], _hashes(chunk), _seed(name))
            start += len(chunk)
    return rows


def _hashes(array: Any) -> NDArray[np.uint64]:
    """Hash each value of an Arrow array; a null is 0."""
    kind = array.type
    out = np.zeros(len(array), np.uint64)
    if len(array) == 0 or pa.types.is_null(kind):
        return out
    if isinstance(kind, pa.BaseExtensionType):
        return _hashes(array.storage)
    if pa.types.is_dictionary(kind):
        values = np.append(_hashes(array.dictionary), np.uint64(0))
        indices: NDArray[np.int64] = array.indices.cast(pa.int64()).fill_null(len(array.dictionary)).to_numpy()
        return values[indices]
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(kind):
        fields = np.zeros(len(array), np.uint64)
        for index, field in enumerate(kind):
            _add(fields, _hashes(array.field(index)), _seed(field.name))
        _hash_words(fields, valid, _seed("struct"), out)
    elif pa.types.is_nested(kind):
        offsets, elements = _elements(array)
        _hash_lists(_hashes(elements), offsets, valid, _seed("list"), out)
    elif pa.types.is_boolean(kind):
        words = array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64)
        _hash_words(words, valid, _seed("bool"), out)
    elif pa.types.is_integer(kind):
        _hash_words(_numbers(array, np.int64), valid, _seed("int"), out)
    elif pa.types.is_floating(kind):
        words = _numbers(array, np.float64)
        numbers = words.view(np.float64)
        whole = (np.abs(numbers) < _WHOLE) & (np.trunc(numbers) == numbers) & (words != _MINUS_ZERO)
        valid &= np.isfinite(numbers)
        _hash_words(words, valid & ~whole, _seed("float"), out)
        _hash_words(np.where(whole, numbers, 0).astype(np.int64).view(np.uint64), valid & whole, _seed("int"), out)
    else:
        data, offsets, name = _bytes(array)
        _hash_bytes(data, offsets, valid, _seed(name), out)
    return out


def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _numbers(array: Any, wide: type[np.int64 | np.float64]) -> NDArray[np.uint64]:
    """View integers as 64-bit ones and floats as doubles, so that a number hashes alike in every width."""
    kind = array.type
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    stored = np.frombuffer(array.buffers()[1], f"{letter}{kind.bit_width // 8}")
    return stored[array.offset : array.offset + len(array)].astype(wide).view(np.uint64)


def _bytes(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64], str]:
    """Return the bytes of all values, where each begins and ends, and their kind."""
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _bytes(array.cast(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()))
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        long = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        _, ends, data = array.buffers()
        stored = np.frombuffer(ends, np.int64 if long else np.int32)
        offsets = stored[array.offset : array.offset + len(array) + 1].astype(np.int64)
        return np.frombuffer(data or b"", np.uint8), offsets, "text" if text else "binary"
    width = kind.bit_width // 8
    offsets = np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * width
    name = "binary" if pa.types.is_fixed_size_binary(kind) else str(kind)
    return np.frombuffer(array.buffers()[1] or b"", np.uint8), offsets, name


def _elements(array: Any) -> tuple[NDArray[np.int64], Any]:
    """Return where each list of an array begins and ends, and the elements of all lists."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return (
            np.arange(len(array) + 1, dtype=np.int64) * size,
            array.values.slice(array.offset * size, len(array) * size),
        )
    if isinstance(array, pa.ListArray | pa.LargeListArray):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return offsets - offsets[0], array.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets = np.zeros(len(array) + 1, np.int64)  # a list view, whose elements may lie in any order
    np.cumsum(array.value_lengths().fill_null(0), out=offsets[1:])
    return offsets, array.flatten()


@compiled
def _mix(state: np.uint64, word: np.uint64) -> np.uint64:
    word *= _B
    word = (word << np.uint64(31)) | (word >> np.uint64(33))
    state ^= word * _A
    return ((state << np.uint64(27)) | (state >> np.uint64(37))) * _A + _D


@compiled
def _finish(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> np.uint64(33))) * _B
    state = (state ^ (state >> np.uint64(29))) * _C
    return state ^ (state >> np.uint64(32))


@compiled(nogil=True)
def _add(rows: NDArray[np.uint64], hashes: NDArray[np.uint64], seed: np.uint64) -> None:
    """Add to each row its hash in one column; sums do not depend on the order of columns."""
    for i in range(len(rows)):
        if hashes[i] != 0:
            rows[i] += _finish(_mix(seed, hashes[i]))


@compiled(nogil=True)
def _hash_words(words: NDArray[np.uint64], valid: NDArray[np.bool_], seed: np.uint64, out: NDArray[np.uint64]) -> None:
    for i in range(len(out)):
        if valid[i]:
            out[i] = _finish(_mix(seed, words[i]))


@compiled(nogil=True)
def _hash_lists(
    elements: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    valid: NDArray[np.bool_],
    seed: np.uint64,
    out: NDArray[np.uint64],
) -> None:
    for i in range(len(out)):
        if valid[i]:
            state = _mix(seed, np.uint64(offsets[i + 1] - offsets[i]))
            for k in range(offsets[i], offsets[i + 1]):
                state = _mix(state, elements[k])
            out[i] = _finish(state)


@compiled(nogil=True)
def _hash_bytes(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    valid: NDArray[np.bool_],
    seed: np.uint64,
    out: NDArray[np.uint64],
) -> None:
    for i in range(len(out)):
        if not valid[i]:
            continue
        at, end = offsets[i], offsets[i + 1]
        state = _mix(seed, np.uint64(end - at))
        while at < end:
            word = np.uint64(0)
            if end - at >= 8:
                for k in range(8):  # compiled to one load
                    word |= np.uint64(data[at + k]) << np.uint64(8 * k)
            else:
                for k in range(end - at):
                    word |= np.uint64(data[at + k]) << np.uint64(8 * k)
            state = _mix(state, word)
            at += 8
        out[i] = _finish(state)
