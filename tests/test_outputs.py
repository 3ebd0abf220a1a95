"""Tables to files that appear whole or not at all."""

from __future__ import annotations

import datetime
import errno
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import llmbatch.outputs
from llmbatch.errors import DataError, JobError
from llmbatch.outputs import Output

TABLE = pa.table({"id": [1, 2, 3], "generated_text": ["a", None, "c"]})
SUMMARY = {"rows": 3, "notes": ["one"]}


def open_output(path: Path | str, *, inputs: list[str] | None = None, **options: Any) -> Output:
    options = {"fingerprint": "f1", "overwrite": False, **options}
    return Output.open(str(path), inputs=inputs or [], **options)


def finish(path: Path | str, table: pa.Table = TABLE, **options: Any) -> Output:
    output = open_output(path, **options)
    output.begin()
    output.write(table)
    output.commit(SUMMARY)
    return output


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_output(path, **options)
    return str(caught.value)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(params=["out", "out.parquet", "out.jsonl"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder, one Parquet file and one JSONL file, none of them there yet."""
    return tmp_path / "new" / str(request.param)


# What a finished job leaves


def test_a_folder_holds_nothing_but_parts_that_every_reader_takes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(out)
    assert tree(tmp_path) == ["out", "out._llmbatch.json", "out/part-00000.parquet"]
    for read in (
        pq.read_table(out),
        ds.dataset(out).to_table(),
        pl.read_parquet(out).to_arrow(),
        pl.read_parquet(f"{out}/").to_arrow(),
        pl.scan_parquet(out).collect().to_arrow(),
        pl.read_parquet(out / "**" / "*.parquet").to_arrow(),
    ):
        assert read.to_pydict() == TABLE.to_pydict()


def test_rows_are_cut_into_parts_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 4)
    output = open_output(tmp_path / "out")
    output.begin()
    for size in (3, 0, 6, 2):
        output.write(pa.table({"a": list(range(size))}))
    output.commit({})
    parts = [pq.read_table(tmp_path / "out" / f"part-0000{i}.parquet")["a"].to_pylist() for i in range(3)]
    assert parts == [[0, 1, 2, 0], [1, 2, 3, 4], [5, 0, 1]]
    manifest = json.loads((tmp_path / "out._llmbatch.json").read_text())
    assert manifest == {
        "format": 1,
        "fingerprint": "f1",
        "parts": [{"name": f"part-0000{i}.parquet", "rows": rows} for i, rows in enumerate((4, 4, 3))],
        "summary": {},
    }


def test_one_file_is_one_file_however_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 2)
    finish(tmp_path / "out.parquet")
    assert tree(tmp_path) == ["out.parquet", "out.parquet._llmbatch.json"]
    assert pq.read_table(tmp_path / "out.parquet").equals(TABLE)


def test_a_table_without_rows_is_an_output(out: Path) -> None:
    finish(out, TABLE.slice(0, 0))
    read = [] if out.suffix == ".jsonl" else pq.read_table(out).to_pylist()
    assert out.exists()
    assert read == []
    assert open_output(out).finished


def test_jsonl_holds_one_object_a_row(tmp_path: Path) -> None:
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
    finish(tmp_path / "out.jsonl", table)
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == (
        '{"text": "é\\n", "number": null, "nested": [{"x": null, "y": 1}], "raw": "AP8=", '
        '"day": "2024-05-06", "time": "2024-05-06T07:08:09", '
        '"nanoseconds": "1970-01-01 00:00:00.000000001", "null": null}\n'
    )


# While a job works


def test_open_creates_nothing(out: Path, tmp_path: Path) -> None:
    assert not open_output(out).finished
    assert tree(tmp_path) == []


def test_no_reader_sees_rows_while_work_is_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 1)
    out = tmp_path / "out"
    output = open_output(out)
    output.begin()
    output.write(TABLE)
    assert tree(out) == ["_llmbatch", "_llmbatch/job.json"] + [
        f"_llmbatch/part-0000{i}.parquet.staged" for i in range(3)
    ]
    assert pq.read_table(out).num_rows == 0
    assert ds.dataset(out).count_rows() == 0
    with pytest.raises(pl.exceptions.InvalidOperationError):
        pl.read_parquet(out)
    output.abort()


def test_one_file_is_not_there_while_work_is_in_progress(tmp_path: Path) -> None:
    output = open_output(tmp_path / "out.parquet")
    output.begin()
    output.write(TABLE)
    assert tree(tmp_path) == [
        "out.parquet._llmbatch",
        "out.parquet._llmbatch/job.json",
        "out.parquet._llmbatch/part-00000.parquet.staged",
    ]
    output.abort()


@pytest.mark.parametrize("progress", ["opened", "begun", "written"])
def test_abort_leaves_nothing_behind(out: Path, tmp_path: Path, progress: str) -> None:
    output = open_output(out)
    if progress != "opened":
        output.begin()
    if progress == "written":
        output.write(TABLE)
    output.abort()
    assert tree(tmp_path) == []


def test_abort_keeps_folders_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = open_output(tmp_path / "out")
    output.begin()
    output.abort()
    assert tree(tmp_path) == ["out"]


def test_abort_after_commit_takes_nothing_away(out: Path, tmp_path: Path) -> None:
    output = finish(out)
    before = tree(tmp_path)
    output.abort()
    assert tree(tmp_path) == before


def test_abort_takes_back_what_a_failed_commit_had_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 1)
    output = open_output(tmp_path / "out")
    output.begin()
    output.write(TABLE)
    replace = os.replace

    def fail_at_the_second(source: Path, target: Path) -> None:
        if target.name == "part-00001.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_second)
    with pytest.raises(JobError) as caught:
        output.commit({})
    assert str(caught.value) == (
        f"the output {tmp_path / 'out'} cannot be put in place: [Errno 28] No space left on device"
    )
    assert (tmp_path / "out" / "part-00000.parquet").exists()
    output.abort()
    assert tree(tmp_path) == []


def test_a_disk_that_refuses_rows_fails_the_job(tmp_path: Path) -> None:
    output = open_output(tmp_path / "out")
    output.begin()
    (tmp_path / "out" / "_llmbatch" / "part-00000.parquet.staged").mkdir()
    with pytest.raises(JobError, match=rf"^the output {tmp_path / 'out'} cannot be written: "):
        output.write(TABLE)


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_left(tmp_path: Path) -> None:
    output = open_output(tmp_path / "new" / "out")
    (tmp_path / "new").write_text("came meanwhile")
    with pytest.raises(DataError, match=rf"^the output {tmp_path / 'new' / 'out'} cannot be made: "):
        output.begin()
    assert tree(tmp_path) == ["new"]


def test_of_two_jobs_that_begin_at_once_the_second_is_refused(out: Path, tmp_path: Path) -> None:
    first, second = open_output(out), open_output(out)
    first.begin()
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"cannot be made: .*File exists"):
        second.begin()
    assert tree(tmp_path) == before


# The same command again, and other commands


def test_the_same_command_finds_its_output_finished_with_its_summary(out: Path) -> None:
    assert finish(out).summary == SUMMARY
    again = open_output(out)
    assert again.finished
    assert again.summary == SUMMARY


def test_another_command_is_refused(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    finish(tmp_path / "out.parquet")
    way_out = "choose another name, or replace it with overwrite=True (--overwrite)"
    assert refusal(tmp_path / "out", fingerprint="f2") == (
        f"the output {tmp_path / 'out'} is not empty, it holds part-00000.parquet: {way_out}"
    )
    assert refusal(tmp_path / "out.parquet", fingerprint="f2") == (
        f"the output {tmp_path / 'out.parquet'} is already there: {way_out}"
    )


def test_an_output_that_lost_a_part_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 2)
    finish(tmp_path / "out")
    (tmp_path / "out" / "part-00001.parquet").unlink()
    assert "is not empty" in refusal(tmp_path / "out")


def test_an_output_that_was_removed_is_made_again(out: Path) -> None:
    finish(out)
    if out.is_dir():
        (out / "part-00000.parquet").unlink()
        out.rmdir()
    else:
        out.unlink()
    assert not open_output(out).finished
    finish(out)
    assert open_output(out).finished


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2, "fingerprint": "f1", "parts": [], "summary": {}}'])
def test_a_manifest_that_is_not_ours_proves_nothing(out: Path, content: str) -> None:
    finish(out)
    out.with_name(out.name + "._llmbatch.json").write_text(content)
    refusal(out)


def test_an_empty_folder_is_a_place_for_an_output(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    finish(tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == 3


def test_work_that_a_killed_job_left_is_refused_and_discarded_on_demand(out: Path) -> None:
    open_output(out).begin()
    work = out / "_llmbatch" if out.suffix == "" else out.with_name(out.name + "._llmbatch")
    assert refusal(out) == (
        f"another job is writing {out}, or was killed and left {work}: wait for it, "
        "or discard its work with overwrite=True (--overwrite)"
    )
    finish(out, overwrite=True)
    assert not work.exists()
    assert open_output(out).finished


def test_overwriting_keeps_the_old_output_until_the_new_one_is_complete(out: Path, tmp_path: Path) -> None:
    finish(out, TABLE.slice(0, 1))
    before = tree(tmp_path)
    output = open_output(out, overwrite=True, fingerprint="f2")
    assert not output.finished
    output.begin()
    output.write(TABLE)
    output.abort()
    assert tree(tmp_path) == before
    assert open_output(out).finished


def test_overwriting_replaces_every_old_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 1)
    finish(out)
    monkeypatch.setattr(llmbatch.outputs, "PART_ROWS", 10)
    finish(out, TABLE.slice(0, 2), overwrite=True, fingerprint="f2")
    assert tree(tmp_path) == ["out", "out._llmbatch.json", "out/part-00000.parquet"]
    assert pq.read_table(out).equals(TABLE.slice(0, 2))
    assert open_output(out, fingerprint="f2").finished


def test_the_same_command_with_overwrite_runs_again(out: Path) -> None:
    finish(out)
    assert not open_output(out, overwrite=True).finished
    finish(out, TABLE.slice(0, 1), overwrite=True)
    assert open_output(out).finished


@pytest.mark.parametrize("name", ["thesis.tex", "photos"])
def test_a_folder_of_other_things_is_never_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert refusal(tmp_path / "out", overwrite=True) == (
        f"only Parquet files are overwritten, but {tmp_path / 'out'} also holds {name}: choose another folder"
    )


# Where an output may lie


def test_an_output_must_not_be_an_input(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    (tmp_path / "link.parquet").symlink_to(path)
    text = "the output must not be an input, got {}: choose another name"
    assert refusal(path, inputs=[str(path)], overwrite=True) == text.format(path)
    assert refusal(path, inputs=[f"file://{path}"], overwrite=True) == text.format(path)
    link = tmp_path / "link.parquet"
    assert refusal(link, inputs=[str(path)], overwrite=True) == text.format(link)


def test_an_output_must_lie_apart_from_the_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    text = "the output must lie apart from the inputs, but {} is {} {}: choose another place"
    inside = folder / "out"
    assert refusal(inside, inputs=[str(folder)]) == text.format(inside, "inside", folder)
    file = folder / "a.parquet"
    assert refusal(folder, inputs=[str(file)]) == text.format(folder, "around", file)


def test_inputs_elsewhere_do_not_matter(tmp_path: Path) -> None:
    assert not open_output(tmp_path / "out", inputs=["s3://bucket/a.parquet", str(tmp_path / "a.parquet")]).finished


def test_the_form_of_what_is_there_must_be_that_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").mkdir()
    (tmp_path / "out").write_text("")
    assert refusal(tmp_path / "out.parquet", overwrite=True) == (
        f"the output {tmp_path / 'out.parquet'} must be a file by its name, but a folder is there"
    )
    assert refusal(tmp_path / "out", overwrite=True) == (
        f"the output {tmp_path / 'out'} must be a folder by its name, but a file is there"
    )


def test_a_file_in_the_way_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "deep" / "out"
    assert refusal(out) == f"the output {out} must lie in a folder, but {tmp_path / 'file'} is a file"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    out = tmp_path / "new" / "out"
    assert refusal(out) == f"the output {out} must lie where it can be written, but {tmp_path} cannot"


@pytest.mark.parametrize("path", ["s3://bucket/out", ""])
def test_an_output_elsewhere_is_refused(path: str) -> None:
    assert refusal(path) == f"an output must be a local path, got {path!r}"


@pytest.mark.parametrize("path", ["out.csv", "out.json"])
def test_another_format_is_refused(path: str) -> None:
    assert refusal(path) == f"an output must be a folder, a .parquet file or a .jsonl file, got {path!r}"


def test_a_column_that_parquet_cannot_hold_is_found_before_the_work(tmp_path: Path) -> None:
    schema = pa.schema({"a": pa.string(), "s": pa.struct([])})
    with pytest.raises(DataError) as caught:
        open_output(tmp_path / "out").check(schema)
    assert str(caught.value) == "Parquet cannot hold column 's' of type struct<>: drop it or convert it"
    open_output(tmp_path / "out.jsonl").check(schema)
    open_output(tmp_path / "out").check(TABLE.schema)
