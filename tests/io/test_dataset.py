"""Inputs: rows of many files as one table, read a window at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import DataError, StorageError
from llmbatch.io.reading import discovery
from llmbatch.io.reading import parquet as parquet_module
from llmbatch.io.reading.dataset import Dataset
from llmbatch.storage import retries
from tests.support.datasets import jsonl, parquet, refusal
from tests.support.s3 import S3Server, Trouble, s3_fixture  # noqa: F401


def write(folder: Path, suffix: str, sizes: Sequence[int], group: int = 3) -> str:
    """Files of `sizes` rows, numbered throughout, in folders that number the files."""
    row = 0
    for number, size in enumerate(sizes):
        rows = [{"id": row + i, "text": f"row {row + i}"} for i in range(size)]
        path = folder / f"file={number}" / f"a{suffix}"
        if suffix == ".parquet":
            path.parent.mkdir(parents=True)
            schema = pa.schema({"id": pa.int64(), "text": pa.string()})
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)
        else:
            jsonl(path, *map(json.dumps, rows))
        row += size
    return str(folder)


FORMATS = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    one, two = parquet(tmp_path / "a.parquet", a=[1]), jsonl(tmp_path / "b.jsonl", "{}")
    assert refusal(str(tmp_path)) == (
        f"all inputs must have one format, got Parquet ({one}) and JSONL ({two}): "
        "name those that are meant, by a glob such as '*.parquet'"
    )


@FORMATS
def test_a_column_whose_name_the_library_needs_is_refused(tmp_path: Path, suffix: str) -> None:
    """Its text was taken for the line that the row was read from, and answers were written into it."""
    path = tmp_path / f"a{suffix}"
    parquet(path, _llmbatch_line=["x}"]) if suffix == ".parquet" else jsonl(path, '{"_llmbatch_line": "x}"}')
    assert refusal(str(path)) == "a column must not have a name of llmbatch's own, got '_llmbatch_line': rename it"


def test_files_of_several_file_systems_are_one_input(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/inputs/b.jsonl", b'{"a": 2}')
    inputs = Dataset.resolve([jsonl(tmp_path / "a.jsonl", '{"a": 1}'), "memory://inputs/b.jsonl"])
    assert inputs.paths == (str(tmp_path / "a.jsonl"), "memory:///inputs/b.jsonl")
    assert inputs.read().to_pydict() == {"a": [1, 2]}


@FORMATS
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), data=st.data())
@settings(max_examples=40)
def test_windows_are_slices_of_all_rows(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, sizes: list[int], data: st.DataObject
) -> None:
    inputs = Dataset.resolve([write(tmp_path_factory.mktemp("inputs"), suffix, [*sizes, 1])])
    whole = inputs.read()
    assert whole["id"].to_pylist() == list(range(sum(sizes) + 1)) == list(range(inputs.num_rows))
    assert whole["file"].to_pylist() == [number for number, size in enumerate([*sizes, 1]) for _ in range(size)]
    columns = data.draw(st.none() | st.lists(st.sampled_from(inputs.schema.names), unique=True))
    reader = inputs.reader(columns)
    edges = sorted(data.draw(st.lists(st.integers(0, inputs.num_rows), max_size=8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_module, "_BATCH_ROWS", 2)
        for start, stop in zip(edges, edges[data.draw(st.integers(0, 1)) :]):
            expected = whole.slice(start, stop - start).select(whole.column_names if columns is None else columns)
            window = reader.read(start, stop)
            assert window.schema == reader.schema == expected.schema
            assert window.num_rows == expected.num_rows
            assert window.to_pylist() == expected.to_pylist()
    reader.close()


@FORMATS
def test_a_reader_does_not_go_back_nor_past_the_end(tmp_path: Path, suffix: str) -> None:
    reader = Dataset.resolve([write(tmp_path, suffix, [4, 4])]).reader()
    reader.read(2, 6)
    for start, stop in ((5, 7), (7, 6), (6, 9)):
        with pytest.raises(ValueError) as caught:
            reader.read(start, stop)
        assert str(caught.value) == f"rows must be read forwards and up to 8, got {start} to {stop} after 6"
    assert reader.read(6, 8)["id"].to_pylist() == [6, 7]
    reader.close()


@FORMATS
def test_files_and_row_groups_before_a_window_are_not_read(tmp_path: Path, suffix: str) -> None:
    inputs = Dataset.resolve([write(tmp_path, suffix, [2, 6, 2])])
    Path(inputs.paths[0]).unlink()
    if suffix == ".parquet":  # the first row group of the next file is damaged
        data = bytearray(Path(inputs.paths[1]).read_bytes())
        end = pq.ParquetFile(inputs.paths[1]).metadata.row_group(1).column(0).dictionary_page_offset
        data[4:end] = b"\xff" * (end - 4)
        before = Path(inputs.paths[1]).stat()
        Path(inputs.paths[1]).write_bytes(data)
        os.utime(inputs.paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    reader = inputs.reader()
    assert reader.read(5, 10)["id"].to_pylist() == [5, 6, 7, 8, 9]
    reader.close()


@FORMATS
@pytest.mark.parametrize("rows", [6, 8])
@pytest.mark.parametrize("window", [4, 8])
def test_a_file_that_was_replaced_is_refused_before_its_rows_are_used(
    tmp_path: Path, suffix: str, rows: int, window: int
) -> None:
    inputs = Dataset.resolve([write(tmp_path, suffix, [8])])
    path = Path(inputs.paths[0])
    reader = inputs.reader()
    reader.read(0, 1)
    path.unlink()
    path.parent.rmdir()
    write(tmp_path, suffix, [rows])
    os.utime(path, (1, 1))
    with pytest.raises(DataError) as caught:
        reader.read(1, window)
    assert str(caught.value) == (
        f"inputs must stay as they are while a job runs, but {path} has changed or is gone: put it back or start over"
    )
    reader.close()


def test_thousands_of_small_files_are_one_input(tmp_path: Path) -> None:
    for number in range(2000):
        pq.write_table(pa.table({"id": [2 * number, 2 * number + 1]}), tmp_path / f"{number:04}.parquet")
    inputs = Dataset.resolve([str(tmp_path)])
    reader = inputs.reader()
    ids = [row for start in range(0, 4000, 800) for row in reader.read(start, start + 800)["id"].to_pylist()]
    assert ids == list(range(4000))
    reader.close()


# Object stores


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between tries. No time passes."""
    waits: list[float] = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits)))
    return waits


@pytest.fixture(scope="module")
def bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of each format one large object, as the tests have it, and two small ones."""
    bucket = s3.bucket("inputs")
    store = fsspec.filesystem("s3", **s3.storage_options)
    for suffix in (".parquet", ".jsonl"):
        store.put(
            write(tmp_path_factory.mktemp("inputs"), suffix, [100, 5, 5]), f"{bucket}/{suffix[1:]}", recursive=True
        )
    return bucket


@pytest.fixture(params=["parquet", "jsonl"])
def stored(request: pytest.FixtureRequest, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr(discovery, "_WHOLE", 1000)
    return Dataset.resolve([f"{bucket}/{request.param}"], s3.storage_options)


def test_objects_are_read_like_files(stored: Dataset) -> None:
    assert stored.schema.names == ["id", "text", "file"]
    reader = stored.reader()
    windows = [reader.read(start, stop) for start, stop in ((10, 50), (50, 101), (104, 110))]
    assert [row for window in windows for row in window["id"].to_pylist()] == [*range(10, 101), *range(104, 110)]
    reader.close()


def test_a_store_that_is_away_for_a_while_is_waited_for(stored: Dataset, s3: S3Server, waits: list[float]) -> None:
    reader = stored.reader()
    rows = []
    for start in range(0, 110, 10):
        s3.troubles[:] = [Trouble(503, "SlowDown")] * 3
        rows += reader.read(start, start + 10)["id"].to_pylist()
    s3.troubles.clear()
    assert rows == list(range(110))
    assert len(waits) >= 3
    reader.close()


def test_a_store_that_stays_away_is_an_error(stored: Dataset, s3: S3Server, waits: list[float]) -> None:
    reader = stored.reader()
    s3.troubles[:] = [Trouble(503, "SlowDown")] * 100
    with pytest.raises(StorageError) as caught:
        reader.read(0, 50)
    s3.troubles.clear()
    assert str(caught.value) == (
        f"{stored.paths[0]} cannot be read: Service Unavailable: "
        "check the endpoint and the network, and run the same command again"
    )
    assert 50 < sum(waits) <= 60
    reader.close()
