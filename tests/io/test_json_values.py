"""Rows as JSON lines: what cannot be written is found beforehand, and never costs the others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError
from llmbatch.io.json_values import unwritable
from llmbatch.io.writing.formats import Jsonl
from tests.support.jobs import Job
from tests.support.outputs import open_output

BAD_TEXT = pa.StringArray.from_buffers(
    3, pa.py_buffer(b"\x00\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0"), pa.py_buffer(b"a\xffc")
)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    Jsonl(None).write(stream, [table])
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([0, 2**62, 0], pa.timestamp("us")), "date value out of range"),
        (pa.array([0, 2**62, 0], pa.timestamp("s", "UTC")), ""),
        (pa.array([0, 2**30, 0], pa.date32()), ""),
        (pa.array([0, 2**62, 0], pa.duration("s")), ""),
        (BAD_TEXT, "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (pa.array([[0], [2**62], []], pa.list_(pa.timestamp("us"))), "date value out of range"),
        (pa.StructArray.from_arrays([BAD_TEXT], ["x"]), "'utf-8' codec can't decode byte 0xff in position 0"),
    ],
    ids=str,
)
def test_a_value_that_has_no_text_is_an_error_of_its_row_and_null_in_its_line(column: pa.Array, reason: str) -> None:
    table = pa.table({"id": [1, 2, 3], "bad": column})
    errors = unwritable(pa.concat_tables([table, table]))
    assert list(errors) == [1, 4]
    assert errors[1].kind == "output"
    assert errors[1].message.startswith(f"JSONL cannot hold the value of column 'bad': {reason}")
    written = rows_of(table)
    assert [row["id"] for row in written] == [1, 2, 3]
    assert [row["bad"] is None for row in written] == [False, True, False]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
        (pa.array([[1]], pa.list_(pa.timestamp("ns"))), ["1970-01-01T00:00:00.000000001"]),
        (pa.array([{"a": 1}], pa.struct({"a": pa.time64("ns")})), {"a": "00:00:00.000000001"}),
        (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
        (pa.array([1], pa.duration("ns")), 1),
        (pa.array([1], pa.timestamp("ns")).dictionary_encode(), "1970-01-01T00:00:00.000000001"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.timestamp("ns"))), [["k", "1970-01-01T00:00:00.000000001"]]),
    ],
    ids=str,
)
def test_nanoseconds_are_written_wherever_they_are(column: pa.Array, text: object) -> None:
    assert rows_of(pa.table({"a": column})) == [{"a": text}]
    assert not unwritable(pa.table({"a": column}))


@pytest.mark.parametrize(("unit", "nanoseconds"), [("s", 10**9), ("ms", 10**6), ("us", 1000), ("ns", 1)])
def test_durations_of_every_unit_are_numbers_of_nanoseconds(unit: str, nanoseconds: int) -> None:
    days = 86_400 * 10**9 // nanoseconds
    table = pa.table({"a": pa.array([[-1, days + 5, None]], pa.list_(pa.duration(unit)))})
    assert rows_of(table) == [{"a": [-nanoseconds, 86_400 * 10**9 + 5 * nanoseconds, None]}]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "-03:30"])
@pytest.mark.parametrize("unit", ["us", "ns"])
def test_times_with_a_zone_are_written_in_iso_8601(unit: str, zone: str) -> None:
    times = pa.array([1_577_836_800_123_456], pa.timestamp("us", zone))
    nested = pa.StructArray.from_arrays([times.cast(pa.timestamp(unit, zone))], ["at"])
    [row] = rows_of(pa.table({"a": nested}))
    digits = "000" if unit == "ns" else ""
    assert row["a"]["at"].replace(f"123456{digits}", "123456") == times[0].as_py().isoformat()


def test_rows_without_columns_are_lines() -> None:
    assert rows_of(pa.table({"a": [1, 2]}).select([])) == [{}, {}]


def deep(levels: int) -> pa.DataType:
    kind: pa.DataType = pa.int64()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("us", "Mars/Olympus"), pa.list_(pa.timestamp("ns", "Mars/Olympus")), deep(200)],
    ids=["time", "nested", "deep"],
)
def test_a_type_of_which_no_value_can_be_written_is_refused_before_anything_runs(
    tmp_path: Path, kind: pa.DataType
) -> None:
    with pytest.raises(DataError) as caught:
        open_output(tmp_path / "out.jsonl").check(pa.schema({"id": pa.int64(), "a": kind}))
    assert str(caught.value).startswith(f"JSONL cannot hold column 'a' of type {kind}")
    assert str(caught.value).endswith(": drop it or convert it")


def test_a_job_answers_the_other_rows_and_says_which_cannot_be_written(job: Job) -> None:
    table = pq.read_table(job.source)
    far = pa.array([2**62 if row == 7 else row for row in range(60)], pa.timestamp("us"))
    job = job.to("out.jsonl")
    job.write(table.append_column("when", far))
    report = job.run()
    assert (report.rows, report.errors) == (60, 1)
    written = [json.loads(line) for line in job.out.read_text().splitlines()]
    assert [row["id"] for row in written] == table["id"].to_pylist()
    assert [row["error_kind"] for row in written] == ["output" if row == 7 else None for row in range(60)]
    assert written[7]["error"] == (
        "JSONL cannot hold the value of column 'when': date value out of range: correct it or drop it"
    )
    assert written[7]["when"] is None
