"""What an earlier output, or a part of one, is good for when the command is run again."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import DataError, JobError
from tests.support.jobs import OTHER, Job, begun, check_refused, no_power_cuts, rows


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    no_power_cuts(monkeypatch)


@pytest.fixture
def failing(small: Job) -> Job:
    """A finished output of which two rows have failed."""
    table = rows(12)
    texts = table["text"].to_pylist()
    texts[3] = texts[8] = None
    small.write(table.set_column(1, "text", pa.array(texts)))
    assert small.run().errors == 2
    return small


def test_a_finished_output_with_too_many_errors_is_not_passed_over(failing: Job) -> None:
    with pytest.raises(JobError) as caught:
        failing.run(max_error_rate=0.0)
    said = "max_error_rate is 0, and 2 of 12 rows have failed already (row 3: prompt is null): "
    assert str(caught.value).startswith(said)
    assert failing.run(max_error_rate=0.2).finished_before


def test_a_finished_output_with_errors_is_not_what_on_error_raise_asks_for(failing: Job) -> None:
    with pytest.raises(JobError) as caught:
        failing.run(on_error="raise")
    assert str(caught.value) == (
        "2 rows failed in an earlier run, and on_error='raise' (--on-error raise) ends a job at the first: answer them "
        "again with retry_errors=True (--retry-errors), or keep them with on_error='column'"
    )


def test_rows_that_failed_are_answered_as_they_read_now_where_they_are_asked_again(failing: Job) -> None:
    failing.write(rows(12))
    with begun() as answered:
        report = failing.run(retry_errors=True)
    assert answered == {"row-3", "row-8"}
    assert (report.errors, report.rows_resumed) == (0, 10)
    assert failing.answers().equals(failing.undisturbed())


def test_rows_that_have_an_answer_must_be_the_same_where_errors_are_asked_again(failing: Job) -> None:
    failing.write(rows(13).slice(1))
    with pytest.raises(DataError, match="the input has changed since this job began: row 0 was answered when it read"):
        failing.run(retry_errors=True)


def test_mended_rows_are_not_taken_where_nothing_asks_for_them(failing: Job) -> None:
    failing.write(rows(12))
    with pytest.raises(DataError, match="the input has changed since this job began: row 3 was answered when it read"):
        failing.run()


def test_errors_in_windows_that_are_whole_end_a_job_that_goes_on(failing: Job) -> None:
    job = failing.to("other")
    job.run_until(9, order="input", max_running=1)
    assert (job.work / "000-window-00000.json").exists()
    with begun() as answered, pytest.raises(JobError, match="failed in an earlier run, and on_error='raise'"):
        job.run(on_error="raise")
    assert not answered


def test_a_finished_output_in_another_order_is_not_what_is_asked_for(
    small: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    small.run(preserve_order=False)
    check_refused(
        small,
        f"the rows of {small.out} are in the order in which they finished, and the input's order is asked for "
        f"(preserve_order=True): ask for preserve_order=False (--no-preserve-order), {OTHER}",
        capfd,
    )
    assert small.run(preserve_order=False).finished_before


def test_an_output_in_the_input_s_order_is_good_for_those_who_do_not_ask_for_it(small: Job) -> None:
    small.run()
    assert small.run(preserve_order=False).finished_before


# Parts that their reader takes away


@pytest.mark.parametrize("taken", [1, 2])
def test_a_published_part_may_be_taken_away(small: Job, taken: int, capfd: pytest.CaptureFixture[str]) -> None:
    job = small.having(preserve_order=False)
    job.run_until(11)
    parts = sorted(job.out.glob("*.parquet"))[:taken]
    elsewhere = [pq.read_table(part) for part in parts]
    for part in parts:
        part.unlink()
    with begun() as answered:
        assert main([*job.having(preserve_order=None).command(), "--no-preserve-order"]) == 0
    here = pq.read_table(job.out)
    assert not answered & {name for table in elsewhere for name in table["id"].to_pylist()}
    assert sorted(pa.concat_tables([here, *elsewhere])["id"].to_pylist()) == sorted(rows(12)["id"].to_pylist())
    told = capfd.readouterr().err
    assert all(f"{part.name} is in {job.out} no more: whoever reads it has taken it away" in told for part in parts)
    assert job.run().finished_before


# Rows that changed


@pytest.mark.parametrize("id_column", [None, "id"])
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("column", ["text", "more"])
def test_answered_rows_that_changed_are_answered_again_where_that_is_asked_for(
    small: Job, id_column: str | None, finished: bool, column: str
) -> None:
    job = small.having(id_column=id_column)
    table = rows(12).append_column("more", pa.array([str(i) for i in range(12)]))
    job.write(table)
    job.run() if finished else job.run_until(10)
    kept = job.kept()
    changed = min(kept, key=lambda name: int(name.removeprefix("row-")))
    values = [
        f"{text}!" if name == changed else text
        for name, text in zip(table["id"].to_pylist(), table[column].to_pylist())
    ]
    job.write(table.set_column(table.column_names.index(column), column, pa.array(values)))
    with pytest.raises(
        DataError, match=r"have such rows answered again with changed_rows='answer' \(--changed-rows answer\)"
    ):
        job.run()
    with begun() as answered:
        job.run(changed_rows="answer")
    assert answered == {*rows(12)["id"].to_pylist()} - kept | {changed}
    assert job.answers().equals(job.undisturbed())
    assert job.run().finished_before


def test_what_becomes_of_changed_rows_is_one_of_two_things(small: Job) -> None:
    with pytest.raises(ValueError, match="changed_rows must be one of refuse, answer, got 'maybe'"):
        small.run(changed_rows="maybe")
