"""Rows of record batches, picked in any order without a chunk that holds too much."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.inference.window_size import window_rows
from llmbatch.io import gather
from llmbatch.io.gather import pick, pieces, row_bytes, split

SCHEMA = pa.schema({"n": pa.int32(), "text": pa.string()})


def batches(*counts: int) -> list[pa.RecordBatch]:
    """Batches of so many rows, numbered through, each row with a text as long as its number."""
    starts = np.cumsum([0, *counts])
    every = pa.RecordBatch.from_pydict(
        {"n": list(range(starts[-1])), "text": ["x" * n for n in range(starts[-1])]}, schema=SCHEMA
    )
    return [every.slice(first, count) for first, count in zip(starts, counts)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data(), st.integers(1, 40))
def test_rows_come_in_the_order_asked_for(counts: list[int], data: st.DataObject, most: int) -> None:
    total = sum(counts)
    index = data.draw(st.lists(st.integers(0, total - 1), max_size=12)) if total else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MOST_BYTES", most)
        table = pick(batches(*counts), np.array(index, np.int64), SCHEMA)
    assert table.schema == SCHEMA
    assert table.to_pydict() == {"n": index, "text": ["x" * n for n in index]}


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_pieces_cover_all_and_hold_no_more_than_their_last_row_adds(sizes: list[int], most: int) -> None:
    ranges = pieces(np.array(sizes, np.int64), most)
    assert [row for first, last in ranges for row in range(first, last)] == list(range(len(sizes)))
    assert all(first < last and sum(sizes[first : last - 1]) <= most for first, last in ranges)


def test_no_chunk_holds_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MOST_BYTES", 500)
    table = pick(batches(30, 30), np.arange(60), SCHEMA)
    assert all(chunk.nbytes < 500 + 60 + 5 * len(chunk) for chunk in table["text"].chunks)
    assert table["text"].num_chunks >= 3


def test_a_table_is_split_where_its_text_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MOST_BYTES", 500)
    table = pa.Table.from_batches(batches(30, 30))
    parts = split(table)
    assert len(parts) > 3
    assert pa.concat_tables(parts).equals(table)
    assert split(table.slice(0, 0)) == [table.slice(0, 0)]


def test_bytes_of_rows_are_those_of_their_text() -> None:
    batch = pa.RecordBatch.from_pydict({"n": [1, 2, 3], "text": ["é", None, "abc"]}, schema=SCHEMA)
    assert row_bytes(batch).tolist() == [4 + 2, 4, 4 + 3]


def test_more_text_than_a_column_of_strings_holds_is_picked_without_being_joined() -> None:
    """The same 64 MiB again and again: 3 GiB of text in one table, of which memory holds 64 MiB."""
    text = pa.array(["x" * (1 << 20)] * 64, pa.string())
    table = pa.table({"n": pa.array(range(64 * 48), pa.int32()), "text": pa.chunked_array([text] * 48)})
    chosen = pick(table.to_batches(), np.array([3071, 0, 1500]), SCHEMA)
    assert chosen["n"].to_pylist() == [3071, 0, 1500]
    assert len(split(table)) == 12


def test_windows_are_smaller_where_answers_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.inference.window_size.available_memory", lambda: 1 << 34)
    assert window_rows(None, 10**6, 10**8, 64) == 100_000
    assert window_rows(None, 10**6, 10**8, 16_384) == 2**32 // (100 * 16 + 16_384 * 16)
    assert window_rows(70, 10**6, 10**8, 16_384) == 70
