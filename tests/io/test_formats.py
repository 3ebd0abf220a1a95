"""Formats: tables to bytes, and back."""

from __future__ import annotations

import datetime
import gzip
import io
import zlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.choices import COMPRESSIONS
from llmbatch.io.json_values import json_holds
from llmbatch.io.writing.formats import Arrow, Format, Jsonl, Parquet, StagedFormat

TABLE = pa.table({"id": [1, 2, 3], "text": ["a", None, "c"]})
STAGED = (Parquet("zstd"), Arrow())


def written(form: Format, *tables: pa.Table) -> bytes:
    stream = io.BytesIO()
    assert form.write(stream, tables) == sum(table.num_rows for table in tables)
    return stream.getvalue()


class FullDisk(io.BytesIO):
    """A stream that takes nothing."""

    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("form", [*STAGED, Jsonl(None), Jsonl("gzip"), Jsonl("zstd")], ids=repr)
def test_what_a_stream_refuses_is_raised_as_it_is(form: Format) -> None:
    table = pa.table({"text": [str(number) for number in range(200_000)]})
    with pytest.raises(OSError, match="No space left on device"):
        form.write(FullDisk(), iter([table, table]))


@pytest.mark.parametrize("form", [*STAGED, Jsonl(None), Jsonl("gzip"), Jsonl("zstd")], ids=repr)
def test_an_error_of_the_rows_is_raised_as_it_is(form: Format) -> None:
    def tables() -> Iterator[pa.Table]:
        yield TABLE
        raise RuntimeError("no more rows")

    with pytest.raises(RuntimeError, match="no more rows"):
        form.write(io.BytesIO(), tables())


@pytest.mark.parametrize("form", [*STAGED, Jsonl(None), Jsonl("gzip"), Jsonl("zstd")], ids=repr)
def test_the_stream_stays_open(form: Format) -> None:
    stream = io.BytesIO()
    form.write(stream, [TABLE])
    assert not stream.closed


@pytest.mark.parametrize("form", STAGED, ids=repr)
def test_tables_come_back_one_by_one_as_they_were(form: StagedFormat) -> None:
    tables = [TABLE.slice(0, 1), TABLE.slice(1)]
    data = written(form, *tables)
    read = [table for table in form.read(io.BytesIO(data), None) if table.num_rows]
    assert all(one.equals(other) for one, other in zip(read, tables, strict=True))
    columns = ["text", "id"]
    assert pa.concat_tables(form.read(io.BytesIO(data), columns)).equals(TABLE.select(columns))


@pytest.mark.parametrize("form", STAGED, ids=repr)
def test_a_table_without_rows_comes_back_with_its_columns(form: StagedFormat) -> None:
    data = written(form, TABLE.slice(0, 0))
    assert pa.concat_tables(form.read(io.BytesIO(data), None)).equals(TABLE.slice(0, 0))


def test_each_table_is_a_row_group_of_parquet() -> None:
    metadata = pq.read_metadata(io.BytesIO(written(Parquet("zstd"), TABLE, TABLE.slice(1))))
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [3, 2]


@pytest.mark.parametrize("compression", [name for name in COMPRESSIONS if name != "auto"])
def test_parquet_is_compressed_as_asked(compression: str) -> None:
    metadata = pq.read_metadata(io.BytesIO(written(Parquet(compression), TABLE)))
    expected = "UNCOMPRESSED" if compression == "none" else compression.upper()
    assert metadata.row_group(0).column(0).compression == expected


def test_arrow_holds_dictionaries_that_change() -> None:
    tables = [pa.table({"kind": pa.array([text]).dictionary_encode()}) for text in "abc"]
    data = written(Arrow(), *tables)
    assert pa.concat_tables(Arrow().read(io.BytesIO(data), None))["kind"].to_pylist() == ["a", "b", "c"]


def test_jsonl_holds_one_object_a_row() -> None:
    when = datetime.datetime(2024, 5, 6, 7, 8, 9)
    table = pa.table(
        {
            "text": ["é\n"],
            "number": [float("nan")],
            "nested": [[{"x": float("inf"), "y": 1}]],
            "raw": [b"\x00\xff"],
            "day": [when.date()],
            "time": pa.array([when], pa.timestamp("us")),
            "nanoseconds": pa.array([1], pa.timestamp("ns")),
            "null": [None],
        }
    )
    assert written(Jsonl(None), table).decode() == (
        '{"text": "é\\n", "number": null, "nested": [{"x": null, "y": 1}], "raw": "AP8=", '
        '"day": "2024-05-06", "time": "2024-05-06T07:08:09", '
        '"nanoseconds": "1970-01-01T00:00:00.000000001", "null": null}\n'
    )


def test_compressed_jsonl_is_one_stream_however_many_tables() -> None:
    plain = written(Jsonl(None), TABLE, TABLE)
    assert plain.count(b"\n") == 6
    zipped = written(Jsonl("gzip"), TABLE, TABLE)
    assert gzip.decompress(zipped) == plain
    first = zlib.decompressobj(wbits=31)
    assert first.decompress(zipped) == plain
    assert first.unused_data == b""
    framed = written(Jsonl("zstd"), TABLE, TABLE)
    assert pa.CompressedInputStream(io.BytesIO(framed), "zstd").read() == plain
    assert framed.count(b"\x28\xb5\x2f\xfd") == 1  # how each zstd frame begins


def test_json_holds_text_numbers_and_what_is_made_of_them() -> None:
    held = [pa.null(), pa.bool_(), pa.uint64(), pa.float32(), pa.string(), pa.large_string(), pa.string_view()]
    others = [pa.binary(), pa.date32(), pa.timestamp("ms"), pa.duration("s"), pa.time64("us"), pa.decimal128(9, 2)]
    for kind in held:
        nested = pa.struct([("x", pa.list_(kind)), ("y", pa.large_list(pa.struct([("z", kind)])))])
        assert json_holds(kind)
        assert json_holds(nested)
    assert json_holds(pa.dictionary(pa.int8(), pa.string()))
    for kind in [*others, pa.map_(pa.string(), pa.string()), pa.dictionary(pa.int8(), pa.binary())]:
        assert not json_holds(kind)
        assert not json_holds(pa.struct([("x", pa.list_(kind))]))
