"""Tables to files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError, JobError, StorageError
from tests.support.outputs import TABLE, begun, commit, described, finish, open_output, stage, tree

FILES = ("out.parquet", "out.jsonl", "out.jsonl.gz", "out.jsonl.zst")


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of every kind, not there yet."""
    return tmp_path / "new" / str(request.param)


@pytest.fixture(params=["out", *FILES])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder and a file of every kind, not there yet."""
    return tmp_path / "new" / str(request.param)


# What a finished job leaves


def test_a_folder_holds_parts_in_order_and_a_manifest(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    assert tree(tmp_path) == ["out"] + [
        f"out/{name}" for name in ("_llmbatch.parquet", "part-00000.parquet", "part-00001.parquet")
    ]
    parts = [pq.read_table(tmp_path / "out" / f"part-0000{index}.parquet") for index in range(2)]
    assert [part.num_rows for part in parts] == [2, 1]
    assert pa.concat_tables(parts).equals(TABLE)


def test_every_reader_takes_a_finished_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(out)
    for read in (
        pq.read_table(out),
        ds.dataset(out).to_table(),
        pa.Table.from_pandas(pd.read_parquet(out)),
        pl.read_parquet(out).to_arrow(),
        pl.scan_parquet(out).collect().to_arrow(),
        pl.read_parquet(out / "*.parquet").to_arrow(),
    ):
        assert read.to_pydict() == TABLE.to_pydict()


def test_one_file_is_one_file_however_many_parts_were_staged(file: Path) -> None:
    manifest = finish(file).manifest()
    assert tree(file.parent) == [file.name, f"{file.name}._llmbatch.json"]
    assert manifest is not None
    assert manifest["parts"] == [{"name": file.name, "rows": 3}]
    if file.suffix == ".parquet":
        assert pq.read_table(file).equals(TABLE)
    else:
        assert pl.read_ndjson(file).to_arrow().to_pydict() == TABLE.to_pydict()


def test_one_parquet_file_has_the_row_groups_of_its_parts(tmp_path: Path) -> None:
    finish(tmp_path / "out.parquet")
    with pq.ParquetFile(tmp_path / "out.parquet") as file:
        assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [2, 1]


def test_a_table_without_rows_is_an_output(out: Path) -> None:
    output = finish(out, TABLE.slice(0, 0))
    if out.suffix in ("", ".parquet"):
        assert pq.read_table(out).equals(TABLE.slice(0, 0))
    else:
        assert pa.input_stream(out).read() == b""
    assert output.manifest() is not None


def test_a_column_that_parquet_cannot_hold_is_found_before_the_work(tmp_path: Path) -> None:
    schema = pa.schema({"a": pa.string(), "s": pa.struct([])})
    with pytest.raises(DataError) as caught:
        open_output(tmp_path / "out").check(schema)
    assert str(caught.value) == "Parquet cannot hold column 's' of type struct<>: drop it or convert it"
    open_output(tmp_path / "out").check(TABLE.schema)
    table = schema.empty_table()
    open_output(tmp_path / "out.jsonl").check(schema)
    finish(tmp_path / "out.jsonl", table)


# While a job works


def test_open_creates_nothing(out: Path, tmp_path: Path) -> None:
    output = open_output(out)
    assert output.manifest() is None
    assert not output.has_work()
    assert tree(tmp_path) == []


@pytest.mark.filterwarnings("ignore:The input list of files is empty")
def test_no_reader_sees_rows_while_work_is_in_progress(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(out) as output:
        stage(output, TABLE)
        assert [name for name in tree(out / "_llmbatch") if not name.startswith("lock")] == [
            "job.json",
            "names.json",
            "part-00000-00.parquet.staged",
            "part-00001-00.parquet.staged",
        ]
        assert pq.read_table(out).num_rows == 0
        assert ds.dataset(out).count_rows() == 0
        assert pd.read_parquet(out).empty
        for place in (out, out / "*.parquet", out / "**" / "*.parquet"):
            with pytest.raises((pl.exceptions.InvalidOperationError, pl.exceptions.ComputeError)):
                pl.read_parquet(place)


def test_one_file_is_not_there_while_work_is_in_progress(file: Path) -> None:
    with begun(file) as output:
        stage(output, TABLE)
        assert os.listdir(file.parent) == [f"{file.name}._llmbatch"]


def test_work_stays_when_a_job_stops(out: Path) -> None:
    with begun(out) as output:
        parts = stage(output, TABLE)
    output = open_output(out)
    assert output.has_work()
    assert output.manifest() is None
    with output.locked():
        output.begin()
        commit(output, parts)
    assert not output.has_work()
    assert output.manifest() is not None


def test_a_staged_part_comes_back_as_it_was(out: Path) -> None:
    table = pa.table(
        {
            "time": pa.array([1, None, 3], pa.timestamp("ns")),
            "raw": [b"\x00", None, b"\xff"],
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    with begun(out) as output:
        assert output.stage("part", [table.slice(0, 1), table.slice(1, 0), table.slice(1)]).rows == 3
        assert pa.concat_tables(output.staged_tables("part")).equals(table)
        columns = ["kind", "time"]
        assert pa.concat_tables(output.staged_tables("part", columns)).equals(table.select(columns))
        output.stage("part", [table.slice(0, 0)])
        assert pa.concat_tables(output.staged_tables("part")).equals(table.slice(0, 0))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("out/_llmbatch/a.parquet.staged", "Parquet magic bytes"), ("out.jsonl._llmbatch/a.arrow.staged", "Expected to")],
)
def test_a_staged_part_that_was_damaged_stops_the_job(tmp_path: Path, name: str, reason: str) -> None:
    staged = tmp_path / name
    with begun(tmp_path / name.partition("/")[0].removesuffix("._llmbatch")) as output:
        output.stage("a", [TABLE])
        staged.write_bytes(staged.read_bytes()[:-9])
        with pytest.raises(StorageError) as caught:
            list(output.staged_tables("a"))
    assert str(caught.value).startswith(f"{staged} is damaged ({reason}")
    assert str(caught.value).endswith("): start over with restart=True (--restart)")


def test_staged_rows_that_are_gone_stop_the_job(tmp_path: Path) -> None:
    with begun(tmp_path / "out.jsonl") as output:
        parts = stage(output, TABLE)
        output.stage(parts[1].name, [TABLE.slice(0, 0)])
        with pytest.raises(StorageError) as caught:
            commit(output, parts)
    assert str(caught.value) == (
        f"{output.work.url}/part-00001-00.arrow.staged is not what was written to it, which no crash does: start over "
        "with restart=True (--restart)"
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_parts_that_do_not_add_up_are_not_committed(out: Path) -> None:
    with begun(out) as output:
        parts = stage(output, TABLE)
        before = tree(out.parent)
        with pytest.raises(JobError) as caught:
            output.commit(parts[:1], described(3), rows=3)
        assert tree(out.parent) == before
    assert str(caught.value) == (
        f"the parts of {out} must hold 3 rows together, but hold 2, which no crash of a job does: start over with "
        "restart=True (--restart)"
    )


def test_what_came_while_the_job_ran_is_not_replaced(out: Path) -> None:
    foreign = out if out.suffix else out / "part-00000.parquet"
    with begun(out) as output:
        parts = stage(output, TABLE)
        foreign.write_text("a thesis")
        with pytest.raises(DataError) as caught:
            commit(output, parts)
        assert foreign.read_text() == "a thesis"
        foreign.unlink()
        commit(output, parts)
    assert output.manifest() is not None
    assert str(caught.value) == (
        f"{foreign.name} came to the output {out} while the job ran, and is not the job's: move it away, and run the "
        "same command again"
    )


def test_a_place_that_refuses_rows_fails_the_job(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as output:
        (tmp_path / "out" / "_llmbatch" / "part.parquet.staged").mkdir()
        with pytest.raises(StorageError, match=r"part\.parquet\.staged cannot be written: Is a directory$"):
            output.stage("part", [TABLE])


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_left(tmp_path: Path) -> None:
    output = open_output(tmp_path / "new" / "out")
    (tmp_path / "new").write_text("came meanwhile")
    with pytest.raises(DataError) as caught, output.locked():
        pass
    assert str(caught.value) == f"{tmp_path / 'new' / 'out' / '_llmbatch'} cannot be made: Not a directory"
    assert tree(tmp_path) == ["new"]


def test_of_two_jobs_the_second_is_refused_and_changes_nothing(out: Path, tmp_path: Path) -> None:
    with begun(out):
        before = tree(tmp_path)
        with pytest.raises(DataError, match=rf"^the output {out} is being written by process {os.getpid()} "):
            begun(out).__enter__()
        assert tree(tmp_path) == before


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    with open_output(tmp_path / "out").locked() as lock:
        lock.check()
        (name,) = os.listdir(tmp_path / "out" / "_llmbatch")
        assert name.startswith("lock-000001-")
    assert tree(tmp_path) == ["out"]


def test_nothing_is_left_of_a_process_that_died_while_it_wrote(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as output:
        (tmp_path / "out" / "_llmbatch" / ".llmbatch-0123").write_bytes(b"half")
        parts = stage(output, TABLE)
        commit(output, parts)
    assert "out/_llmbatch" not in tree(tmp_path)


# Parts that appear before the job ends


def test_a_published_part_has_its_name_at_once_and_keeps_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(out) as output:
        parts = stage(output, TABLE)
        for _ in range(2):
            output.publish(parts[1].name, "part-00000.parquet")
            assert pq.read_table(out).equals(TABLE.slice(2))
        assert pa.concat_tables(output.staged_tables(parts[1].name)).equals(TABLE.slice(2))
        commit(output, parts)
    manifest = output.manifest()
    assert manifest is not None
    assert manifest["parts"] == [
        {"name": "part-00001.parquet", "rows": 2},
        {"name": "part-00000.parquet", "rows": 1},
    ]
    assert pq.read_table(out)["id"].to_pylist() == [3, 1, 2]


def test_a_part_is_not_published_in_the_place_of_what_came_meanwhile(tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "part-00000.parquet"
    with begun(tmp_path / "out") as output:
        parts = stage(output, TABLE)
        foreign.write_text("a thesis")
        with pytest.raises(DataError, match=r"^part-00000\.parquet came to the output .* while the job ran"):
            output.publish(parts[0].name, foreign.name)
        assert foreign.read_text() == "a thesis"
        foreign.unlink()
        output.publish(parts[0].name, foreign.name)
    assert pq.read_table(foreign).equals(TABLE.slice(0, 2))


def test_a_published_part_that_is_not_committed_goes(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as output:
        output.stage("stale", [TABLE])
        output.publish("stale", "part-00000.parquet")
        parts = stage(output, TABLE)
        commit(output, parts)
    assert pq.read_table(tmp_path / "out").equals(TABLE)
    assert output.manifest() is not None


def test_nothing_is_published_where_something_is_replaced(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    with begun(tmp_path / "out") as output:
        parts = stage(output, TABLE.slice(0, 1))
        output.publish(parts[0].name, "part-00000.parquet")
        assert pq.read_table(tmp_path / "out").equals(TABLE)
        commit(output, parts)
    assert pq.read_table(tmp_path / "out").equals(TABLE.slice(0, 1))
