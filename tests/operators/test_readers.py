"""Readers of every library: how much of the input is in memory while it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from llmbatch.operators.duckdb_relations import giving_back
from llmbatch.operators.readers import ROWS, to_reader

GROUPS, GROUP = 160, 1 << 20  # of a file, and bytes of each


def texts(rows: int, nbytes: int) -> pa.Table:
    """Rows of so many bytes, each another."""
    return pa.table({"text": [f"{row:0{nbytes}d}" for row in range(rows)]})


def held_by(reader: pa.RecordBatchReader) -> tuple[int, int]:
    """Count the rows of a reader, and the most bytes of Arrow that there were while each batch was worked on."""
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for batch in reader:
        rows += batch.num_rows
        for _ in range(10):
            most = max(most, pa.total_allocated_bytes() - before)
            hashlib.sha256(batch.serialize()).digest()
    return rows, most


@pytest.mark.parametrize("kind", ["text", "list"])
def test_of_a_dataset_few_row_groups_are_in_memory(tmp_path: Path, kind: str) -> None:
    table = texts(GROUPS * 32, GROUP // 32)
    if kind == "list":
        table = pa.table({"text": [[{"content": text.as_py()}] for text in table["text"]]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=32, use_dictionary=False)
    rows, most = held_by(to_reader(ds.dataset(tmp_path)))
    assert rows == GROUPS * 32
    assert most <= GROUPS / 4 * GROUP  # threads read 8 to 20 groups ahead, however many there are


def test_a_relation_of_duckdb_comes_in_batches_of_few_rows() -> None:
    duckdb = pytest.importorskip("duckdb")
    relation: Any = duckdb.connect().sql("select range as id from range(20000)")
    assert [batch.num_rows for batch in to_reader(relation)] == [ROWS] * 9 + [20000 - 9 * ROWS]


def test_duckdb_gives_freed_memory_back_and_no_setting_of_the_relation_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    duckdb = pytest.importorskip("duckdb")
    connection: Any = duckdb.connect()
    set_before = connection.sql("from duckdb_settings()").fetchall()
    opened: list[Any] = []
    opens = duckdb.connect

    def connect(*given: Any, **named: Any) -> Any:
        opened.append(opens(*given, **named))
        return opened[-1]

    monkeypatch.setattr(duckdb, "connect", connect)
    closed = []

    def batches() -> Generator[pa.RecordBatch]:
        try:
            yield from to_reader(connection.sql("select range || repeat('x', 4000) as text from range(20000)"))
        finally:
            closed.append(True)

    reading = giving_back(batches())
    assert sum(batch.num_rows for batch, _ in zip(reading, range(6), strict=False)) == 6 * ROWS
    (empty,) = opened
    assert empty.sql("select current_setting('memory_limit')").fetchall() == [("61.0 MiB",)]
    assert sum(batch.num_rows for batch in reading) == 20000 - 7 * ROWS
    assert closed == [True]
    assert connection.sql("from duckdb_settings()").fetchall() == set_before
