"""Hashes of rows: equal values hash equal however they are stored, other values do not."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmbatch.io.row_hash import hash_rows

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.decimal128(9, 2), st.decimals(-1000, 1000, places=2)),
    (pa.decimal256(9, 2), st.decimals(-1000, 1000, places=2)),
    (pa.date32(), st.dates()),
    (pa.time64("us"), st.times()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.duration("us"), st.timedeltas()),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=20)),
    (pa.large_binary(), st.binary(max_size=20)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(9), st.binary(min_size=9, max_size=9)),
    (pa.dictionary(pa.int8(), pa.string()), TEXT),
]


def nested(
    inner: st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    def around(pair: tuple[pa.DataType, st.SearchStrategy[Any]]) -> list[tuple[pa.DataType, st.SearchStrategy[Any]]]:
        kind, values = pair
        some = st.none() | values
        return [
            (pa.list_(kind), st.lists(some, max_size=3)),
            (pa.large_list(kind), st.lists(some, max_size=3)),
            (pa.list_view(kind), st.lists(some, max_size=3)),
            (pa.list_(kind, 2), st.lists(some, min_size=2, max_size=2)),
            (pa.map_(pa.string(), kind), st.lists(st.tuples(TEXT, some), max_size=3)),
            (pa.struct({"a": kind, "b": pa.int64()}), st.fixed_dictionaries({"a": some, "b": st.integers(0, 9)})),
        ]

    return inner.flatmap(lambda pair: st.sampled_from(around(pair)))


COLUMN = st.recursive(st.sampled_from(VALUES), nested, max_leaves=3)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(COLUMN)
    return pa.array(draw(st.lists(st.none() | values, min_size=1, max_size=9)), kind)


def hashes(**arrays: Any) -> list[int]:
    found: list[int] = hash_rows(pa.table(arrays)).tolist()
    return found


@given(columns(), st.data())
def test_rows_hash_alike_in_any_slice_and_chunk(column: pa.Array, data: st.DataObject) -> None:
    whole = hash_rows(pa.table({"a": column}))
    assert (whole.dtype, whole.shape) == (np.dtype(np.uint64), (len(column),))
    start = data.draw(st.integers(0, len(column)))
    pieces = pa.chunked_array([column.slice(0, start), column.slice(start)], column.type)
    assert hashes(a=pieces) == whole.tolist()
    assert hashes(a=column.slice(start)) == whole[start:].tolist()
    assert hash_rows(pa.table({"a": pieces}).slice(start)).tolist() == whole[start:].tolist()


@given(columns())
def test_a_row_hashes_alike_wherever_it_stands(column: pa.Array) -> None:
    backwards = pa.array(column.to_pylist()[::-1], column.type)
    assert hashes(a=backwards)[::-1] == hashes(a=column)


@given(columns(), st.data())
def test_another_value_has_another_hash(column: pa.Array, data: st.DataObject) -> None:
    rows = st.integers(0, len(column) - 1)
    i, k = data.draw(rows), data.draw(rows)
    one, other = column[i].as_py(), column[k].as_py()
    found = hashes(a=column)
    assert (found[i] == found[k]) == (repr(one) == repr(other))


@given(st.binary(max_size=40), st.data())
def test_one_changed_byte_changes_the_hash(value: bytes, data: st.DataObject) -> None:
    assume(value)
    at = data.draw(st.integers(0, len(value) - 1))
    changed = bytearray(value)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert len(set(hashes(a=[value, bytes(changed), value[:-1], value + b"\0"]))) == 4


@pytest.mark.parametrize(
    "values",
    [
        [None, ""],
        [None, []],
        [None, {"a": None}],
        [None, False],
        [None, 0],
        [None, 0.0],
        [None, b""],
        [[], [None]],
        [[None], [None, None]],
        [["a", "b"], ["ab"]],
        [["a", "b"], ["b", "a"]],
        [[["a"], []], [[], ["a"]]],
        [{"a": "x", "b": "y"}, {"a": "y", "b": "x"}],
        [0.0, -0.0],
        [datetime.timedelta(0), None],
        [decimal.Decimal("0.0"), None],
    ],
)
def test_values_that_are_near_are_told_apart(values: list[Any]) -> None:
    one, other = hashes(a=values)
    assert one != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.large_string()),
        (pa.string(), pa.string_view()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string())),
        (pa.binary(), pa.large_binary()),
        (pa.binary(), pa.binary_view()),
        (pa.binary(), pa.binary(2)),
        (pa.list_(pa.string()), pa.large_list(pa.large_string())),
        (pa.list_(pa.string()), pa.list_view(pa.string())),
        (pa.list_(pa.string()), pa.list_(pa.string(), 2)),
    ],
)
def test_text_and_lists_hash_alike_in_every_layout(one: pa.DataType, other: pa.DataType) -> None:
    values = [None, ["ab", None], ["cd", "ef"]] if pa.types.is_list(one) else [None, "ab", "cd"]
    assert hashes(a=pa.array(values, one)) == hashes(a=pa.array(values, other))


def test_a_number_hashes_alike_in_every_width() -> None:
    integers = [hashes(a=pa.array([7, None], kind)) for kind in (pa.int8(), pa.uint8(), pa.int64(), pa.uint64())]
    assert integers[1:] == integers[:-1]
    assert hashes(a=pa.array([0.5], pa.float32())) == hashes(a=pa.array([0.5], pa.float64()))
    assert hashes(a=[1, -(2**53), None]) == hashes(a=[1.0, -(2.0**53), None])
    assert hashes(a=[1]) != hashes(a=[1.5])
    assert hashes(a=[float("nan"), float("inf"), 2.0**63]) != hashes(a=[0.0, 0.0, 0.0])


def test_text_and_bytes_are_told_apart() -> None:
    assert hashes(a=["x"]) != hashes(a=[b"x"])


def test_a_timestamp_is_another_one_in_another_zone() -> None:
    assert hashes(a=pa.array([1], pa.timestamp("s"))) != hashes(a=pa.array([1], pa.timestamp("s", "Europe/Berlin")))


def test_an_extension_hashes_like_what_it_stores() -> None:
    stored = pa.array([[1, 2], None], pa.list_(pa.int32(), 2))
    tensor = pa.fixed_shape_tensor(pa.int32(), [2])
    assert hashes(a=pa.ExtensionArray.from_storage(tensor, stored)) == hashes(a=stored)


def test_names_count_and_the_order_of_columns_and_fields_does_not() -> None:
    assert hashes(a=["x"], b=["y"]) == hashes(b=["y"], a=["x"])
    assert hashes(a=["x"], b=["y"]) != hashes(a=["y"], b=["x"])
    assert hashes(a=["x"]) != hashes(b=["x"])
    assert hashes(a=[{"b": 1, "c": 2}]) == hashes(a=[{"c": 2, "b": 1}])


def test_a_column_or_field_of_nulls_leaves_rows_what_they_are() -> None:
    assert hashes(a=["x"], b=pa.nulls(1)) == hashes(a=["x"])
    assert hashes(a=["x"], b=pa.nulls(1, pa.string())) == hashes(a=["x"])
    assert hashes(a=[{"b": 1, "c": None}]) == hashes(a=[{"b": 1}])


def test_what_lies_under_a_null_does_not_count() -> None:
    mask = pa.py_buffer(b"\x01")  # the second value is null
    data = pa.py_buffer(b"abxyz")
    offsets = pa.py_buffer(np.array([0, 2, 5], np.int32))
    assert hashes(a=pa.StringArray.from_buffers(2, offsets, data, mask)) == hashes(a=["ab", None])
    numbers = pa.py_buffer(np.array([7, 9], np.int64))
    assert hashes(a=pa.Array.from_buffers(pa.int64(), 2, [mask, numbers])) == hashes(a=[7, None])
    lists = pa.ListArray.from_arrays([0, 2, 3], [1, 2, 3], mask=pa.array([False, True]))
    assert hashes(a=lists) == hashes(a=[[1, 2], None])
    structs = pa.StructArray.from_arrays([pa.array([1, 2])], ["b"], mask=pa.array([False, True]))
    assert hashes(a=structs) == hashes(a=[{"b": 1}, None])
    indices = pa.array([0, None, 1], pa.int8())
    assert hashes(a=pa.DictionaryArray.from_arrays(indices, ["x", None])) == hashes(a=["x", None, None])


def test_a_table_without_rows_or_columns_has_hashes_all_the_same() -> None:
    assert hashes(a=pa.array([], pa.string())) == []
    assert hash_rows(pa.table({"a": [1, 2]}).select([])).tolist() == [0, 0]


def test_hashes_stay_what_they_are_from_one_version_to_the_next() -> None:
    table = pa.table({"prompt": ["What is the capital of France?", None], "n": [1, 2], "tags": [["a"], []]})
    assert hash_rows(table).tolist() == [4722245777498937691, 917818549146042839]
