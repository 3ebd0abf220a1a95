"""What a job that was begun or finished makes of another command, another input, and the same command again."""

from __future__ import annotations

import decimal
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import DataError, ParameterError
from llmbatch.io.sealed_json import seal
from tests.support.jobs import OTHER, Job, begun, check_goes_on, check_refused, contents, rows
from tests.support.models import tiny_model_folder


def begin(job: Job) -> None:
    """Answer some rows of all windows but the last."""
    job.run_until(25)
    assert 20 < len(job.kept()) < 60


def finish(job: Job) -> None:
    job.run()


STATES = pytest.mark.parametrize("until", [begin, finish])


# The same command again


def test_a_finished_job_says_so_and_ends_with_status_0(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    finish(job)
    before = contents(job.folder)
    assert main(job.command("--json")) == 0
    told = capfd.readouterr()
    assert told.err == f"llmbatch: the output {job.out} is finished already; --restart starts over\n"
    assert json.loads(told.out)["finished_before"] is True
    assert contents(job.folder) == before


def test_a_finished_output_says_that_it_keeps_its_compression(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    finish(job)
    before = contents(job.folder)
    assert main(job.command("--compression", "zstd")) == 0
    assert "compression" not in capfd.readouterr().err
    assert main(job.command("--compression", "none")) == 0
    assert capfd.readouterr().err.startswith(
        "llmbatch: the output keeps its compression, zstd: none would be that of a job that starts over (--restart)\n"
    )
    assert contents(job.folder) == before


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_compression_of_parquet_is_refused_for_jsonl(job: Job, compression: str) -> None:
    with pytest.raises(ParameterError) as raised:
        job.to("out.jsonl").run(compression=compression)
    assert str(raised.value) == (
        f"compression must be left out where the output is JSONL, got {compression!r}: the output's name says it "
        "(.jsonl.gz, .jsonl.zst)"
    )


def test_a_finished_output_of_another_compression_is_not_told_of_where_none_is_asked_for(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    finish(job.having(compression="snappy"))
    capfd.readouterr()
    assert main(job.command()) == 0
    assert "compression" not in capfd.readouterr().err


def test_a_finished_output_that_was_moved_is_told_of_by_its_new_path(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    finish(job)
    moved = job.out.rename(job.out.with_name("moved"))
    assert main([str(moved) if word == str(job.out) else word for word in job.command("--json")]) == 0
    told = capfd.readouterr()
    assert told.err == f"llmbatch: the output {moved} is finished already; --restart starts over\n"
    assert json.loads(told.out)["output"] == str(moved)


@STATES
def test_restart_starts_over(job: Job, until: Callable[[Job], None]) -> None:
    until(job)
    job = job.having(max_tokens=30)
    with begun() as answered:
        report = job.run(restart=True)
    assert answered == set(rows()["id"].to_pylist())
    assert report.rows_resumed == 0
    assert job.answers().equals(job.undisturbed())


@STATES
def test_how_a_job_is_run_may_change(job: Job, until: Callable[[Job], None]) -> None:
    until(job)
    report = job.run(order="input", window_rows=7, kv_memory=2**21, max_running=3, page_size=16)
    assert report.rows == 60


@pytest.mark.parametrize("sizes", [[7], [50, 7], [50, 20]])
def test_a_job_goes_on_in_windows_of_another_size(job: Job, sizes: list[int]) -> None:
    begin(job)
    for size in sizes[:-1]:
        job.run_until(40, window_rows=size)
    kept = job.kept()
    with begun() as answered:
        report = job.run(window_rows=sizes[-1])
    assert not answered & kept
    assert report.rows_resumed == len(kept)
    assert job.answers().equals(job.undisturbed())


def test_windows_that_are_published_keep_their_size(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job = job.having(preserve_order=False)
    job.run_until(25)
    said = (
        f"the job at {job.out} publishes rows as they finish (preserve_order=False), so it cannot go on with other "
        f"window_rows before it is done: finish it first, {OTHER}"
    )
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        job.run(window_rows=7)


# Another command


@STATES
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_tokens": 91}, "max_tokens was 90 and is 91"),
        (
            {"prompt": None, "template": "Q: {text}"},
            "prompt was 'text' and is None and template was None and is 'Q: {text}'",
        ),
        ({"prompt": "id", "temperature": 0.5}, "prompt was 'text' and is 'id' and temperature was 0.0 and is 0.5"),
        ({"id_column": "id"}, "id_column was None and is 'id'"),
        ({"dtype": "bfloat16"}, "dtype was 'float32' and is 'bfloat16'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype was 'auto' and is 'int8'"),
    ],
)
def test_another_command_is_refused(
    job: Job,
    until: Callable[[Job], None],
    changes: dict[str, Any],
    told: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    until(job)
    what = f"job at {job.out} was begun" if until is begin else f"output {job.out} was made"
    said = f"the {what} by another command, in which {told}: give the same command, {OTHER}"
    check_refused(job.having(**changes), said, capfd)


@STATES
def test_another_model_is_refused(
    job: Job, until: Callable[[Job], None], tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(job.model, folder, dirs_exist_ok=True)
    job = Job(str(folder), job.folder, options=job.options)
    until(job)
    tiny_model_folder(folder, "llama", seed=1)
    what = f"job at {job.out} was begun" if until is begin else f"output {job.out} was made"
    said = f"the {what} by another command, in which the files of the model were others: give the same command, {OTHER}"
    check_refused(job, said, capfd)


# Another input


@STATES
@pytest.mark.parametrize("count", [59, 75])
def test_more_or_fewer_rows_are_refused(
    job: Job, until: Callable[[Job], None], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    until(job)
    job.write(rows(count))
    said = (
        f"the input has changed since this job began: it had 60 rows and has {count}: restore it, {OTHER}; "
        "with an id_column (--id-column) a job goes on with a changed input"
    )
    check_refused(job, said, capfd)


def changed(table: pa.Table, row: int) -> pa.Table:
    """The table with another text in one row."""
    texts = table["text"].to_pylist()
    texts[row] += "!"
    return table.set_column(1, "text", pa.array(texts))


@STATES
@pytest.mark.parametrize("id_column", [None, "id"])
def test_a_row_that_reads_otherwise_is_refused(
    job: Job, until: Callable[[Job], None], id_column: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job.having(id_column=id_column)
    until(job)
    row = min(int(name.removeprefix("row-")) for name in job.kept())
    job.write(changed(rows(), row))
    said = (
        f"the input has changed since this job began: row {row} was answered when it read otherwise: restore it, "
        f"have such rows answered again with changed_rows='answer' (--changed-rows answer), {OTHER}"
    )
    check_refused(job, said, capfd)


@STATES
def test_another_order_of_the_rows_is_refused_without_ids(
    job: Job, until: Callable[[Job], None], capfd: pytest.CaptureFixture[str]
) -> None:
    until(job)
    row = min(int(name.removeprefix("row-")) for name in job.kept())
    job.write(rows().take(np.arange(60)[::-1]))
    said = (
        f"the input has changed since this job began: row {row} was answered when it read otherwise: restore it, "
        f"have such rows answered again with changed_rows='answer' (--changed-rows answer), {OTHER}"
    )
    check_refused(job, said, capfd)


@STATES
def test_the_same_rows_in_a_new_file_are_the_same_input(job: Job, until: Callable[[Job], None]) -> None:
    until(job)
    pq.write_table(rows(), job.source, row_group_size=9, compression="none")
    check_goes_on(job)


@STATES
def test_with_ids_rows_may_change_places_and_come_and_go(job: Job, until: Callable[[Job], None]) -> None:
    job = job.having(id_column="id")
    until(job)
    job.write(rows(75).take(np.random.default_rng(0).permutation(np.arange(10, 75))))
    check_goes_on(job)


@STATES
def test_with_ids_an_input_may_change_again_and_again(job: Job, until: Callable[[Job], None]) -> None:
    job = job.having(id_column="id")
    until(job)
    for count in (75, 90, 100):
        kept = job.kept()
        job.write(rows(count).take(np.random.default_rng(count).permutation(count)))
        with begun() as answered:
            job.run_until(len(kept) + 8)
        assert not answered & kept
        assert job.kept() > kept
    check_goes_on(job)


@STATES
@pytest.mark.parametrize("id_column", [None, "id"])
def test_lost_columns_and_values_in_new_ones_are_refused(
    job: Job, until: Callable[[Job], None], id_column: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job.having(id_column=id_column)
    job.write(rows().append_column("extra", rows()["n"]))
    until(job)
    said = f"the input has changed since this job began: column 'extra' is gone: restore it, {OTHER}"
    job.write(rows())
    check_refused(job, said, capfd)
    job.write(rows().append_column("extra", rows()["n"]).append_column("more", rows()["n"]))
    said = (
        "the input has changed since this job began: row 0 was answered when it read otherwise: restore it, have such "
        f"rows answered again with changed_rows='answer' (--changed-rows answer), {OTHER}"
    )
    check_refused(job, said, capfd)


@pytest.mark.parametrize(("until", "name"), [(begin, "out"), (finish, "out"), (finish, "out.jsonl")])
def test_rows_that_are_added_may_have_a_new_column_and_other_numbers(
    job: Job, until: Callable[[Job], None], name: str
) -> None:
    """As in JSONL, where a line may have a key that none had, or 0.5 where all had whole numbers."""
    job = job.to(name).having(id_column="id")
    table = rows().append_column("extra", rows()["n"])
    job.write(table)
    until(job)
    kept = job.kept() if name == "out" else set(rows()["id"].to_pylist())
    more = rows(70)
    extra = pa.array([*map(float, rows()["n"].to_pylist()), *([0.5] * 10)])
    new = pa.array([None] * 60 + ["new"] * 10)
    job.write(more.append_column("extra", extra).append_column("new", new))
    with begun() as answered:
        job.run()
    assert answered == set(more["id"].to_pylist()) - kept


@pytest.mark.parametrize("name", ["out", "out.parquet"])
@pytest.mark.parametrize("finished", [True, False])
def test_columns_may_change_places_and_widths(job: Job, name: str, finished: bool) -> None:
    job = job.to(name).having(order="input")
    if finished:
        job.run()
    else:
        job.run_until(50)
        assert list(job.work.glob("*.staged"))
    table = rows().set_column(2, "n", rows()["n"].cast(pa.int16())).select(["n", "text", "id"])
    job.write(table)
    check_goes_on(job)
    assert pq.read_table(job.out).select([0, 1, 2]).schema == table.schema


EVERY_TYPE = pa.table(
    {
        "key": pa.array([5, 3, 8], pa.uint16()),
        "text": pa.array(["a", "b", "c"], pa.large_string()),
        "kind": pa.array(["x", None, "x"]).dictionary_encode(),
        "list": pa.array([[1, None], [], None], pa.list_(pa.int8())),
        "struct": pa.array([{"a": 1.5, "b": [True]}, None, {"a": None, "b": None}]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "half": pa.array(np.array([0.5, -0.0, 7.0], np.float16)),
        "when": pa.array([1, None, -1], pa.timestamp("ns", "Europe/Paris")),
        "day": pa.array([1, 2, None], pa.date32()),
        "money": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal(-3)], pa.decimal128(9, 2)),
        "bytes": pa.array([b"\0", b"", None]),
        "nothing": pa.nulls(3),
    }
)


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_rows_of_every_type_are_found_again_in_a_finished_output(job: Job, name: str) -> None:
    job = job.to(name).having(id_column="key", output_tokens=None, max_tokens=3)
    job.write(EVERY_TYPE)
    finish(job)
    job.write(EVERY_TYPE.take([2, 0, 1]))
    report = job.run()
    assert (report.rows_resumed, report.finished_before) == (3, False)
    assert pq.read_table(job.out).select(EVERY_TYPE.column_names).equals(pq.read_table(job.source))


def test_a_job_goes_on_in_the_numbers_that_it_was_begun_in(job: Job) -> None:
    """Which are fast is measured, and the next process may measure otherwise."""
    job = job.having(dtype="auto")
    job.run_until(25)
    kept = json.loads((job.work / "job.json").read_text())
    other = "bfloat16" if kept["dtype"] == "float32" else "float32"
    del kept["checksum"]
    (job.work / "job.json").write_bytes(seal("job.json", {**kept, "dtype": other}))
    assert job.run().dtype == other
