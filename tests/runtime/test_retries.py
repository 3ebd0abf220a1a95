"""Rows that fail: which of them are run again, which end a job, and which are given up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from llmbatch.cli.main import main
from llmbatch.engine.recorded import RecordedEngine
from llmbatch.errors import DataError, JobError
from llmbatch.scheduler.output import Step, StepResult
from tests.support.jobs import Job, begun, rows

POISON = (13, 29)  # generated tokens of the rows that kill the engine
ROWS = rows()
BAD = {ROWS["id"][i].as_py() for i, n in enumerate(ROWS["n"].to_pylist()) if n in POISON}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Two rows kill the engine, until this is called."""
    execute = RecordedEngine.execute
    poisonous = set(POISON)

    def dies(engine: RecordedEngine, step: Step) -> StepResult:
        killers = poisonous.intersection(engine._requests.recorded[step.requests].tolist())
        if killers:
            raise RuntimeError("poison")
        return execute(engine, step)

    monkeypatch.setattr(RecordedEngine, "execute", dies)
    return poisonous.clear


def failed(table: pa.Table) -> set[str]:
    return set(table.filter(pc.is_valid(table["error"]))["id"].to_pylist())


def test_a_row_that_kills_the_engine_fails_alone(job: Job, poison: Callable[[], None]) -> None:
    report = job.run()
    answers = job.answers()
    assert report.errors == 2
    assert report.engine_deaths > 2
    assert failed(answers) == BAD
    wrong = answers.filter(pc.is_valid(answers["error"]))
    assert wrong["error_kind"].to_pylist() == ["engine"] * 2
    poison()
    expected = job.undisturbed()
    good = ~np.isin(expected["id"].to_pylist(), list(BAD))
    assert answers.filter(pa.array(good)).equals(expected.filter(pa.array(good)))


@pytest.mark.parametrize(("id_column", "preserve_order"), [(None, True), ("id", True), ("id", False)])
def test_of_a_finished_output_failed_rows_alone_are_run_again(
    job: Job, poison: Callable[[], None], id_column: str | None, preserve_order: bool
) -> None:
    job = job.having(id_column=id_column, preserve_order=preserve_order)
    job.run()
    assert job.run().finished_before
    poison()
    with begun() as answered:
        report = job.run(retry_errors=True)
    assert answered == BAD
    assert (report.rows_resumed, report.errors) == (58, 0)
    assert job.answers().sort_by("id").equals(job.undisturbed().sort_by("id"))
    assert job.run(retry_errors=True).finished_before


def test_of_an_unfinished_output_failed_rows_are_run_again_as_well(job: Job, poison: Callable[[], None]) -> None:
    job.run_until(50)
    kept = job.kept()
    assert kept >= BAD
    poison()
    with begun() as answered:
        report = job.run(retry_errors=True)
    assert answered == BAD | (set(ROWS["id"].to_pylist()) - kept)
    assert (report.rows_resumed, report.errors) == (len(kept - BAD), 0)
    assert job.answers().equals(job.undisturbed())


def test_rows_that_are_published_already_are_not_run_again_before_the_job_is_done(
    job: Job, poison: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    job = job.having(preserve_order=False)
    job.run_until(50)
    capfd.readouterr()
    with pytest.raises(DataError) as caught:
        job.run(retry_errors=True)
    assert str(caught.value) == (
        f"the job at {job.out} publishes rows as they finish (preserve_order=False), so it cannot go on with its "
        "errors before it is done: finish it first, choose another output, or start over with restart=True (--restart)"
    )


def test_failed_rows_stay_failed_without_being_asked_for(job: Job, poison: Callable[[], None]) -> None:
    job.run_until(50)
    kept = job.kept()
    poison()
    with begun() as answered:
        report = job.run()
    assert not answered & kept
    assert report.errors == 2
    assert failed(job.answers()) == BAD


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("preserve_order", [True, False])
def test_a_retry_that_dies_goes_on_as_one(
    job: Job, poison: Callable[[], None], preserve_order: bool, asked: bool
) -> None:
    job = job.having(preserve_order=preserve_order, id_column="id")
    job.run()
    poison()
    job.run_until(1, retry_errors=True)
    with begun() as answered:
        report = job.run(retry_errors=asked)
    assert answered == BAD
    assert (report.rows_resumed, report.errors) == (58, 0)
    assert job.answers().sort_by("id").equals(job.undisturbed().sort_by("id"))


def test_a_retry_may_fail_again(job: Job, poison: Callable[[], None]) -> None:
    job.run()
    before = job.answers()
    with begun() as answered:
        report = job.run(retry_errors=True)
    assert answered == BAD
    assert (report.rows_resumed, report.errors) == (58, 2)
    assert job.answers().drop("error").equals(before.drop("error"))


# What ends a job


def nulls(job: Job, count: int) -> Job:
    """The job with null prompts in its first rows."""
    texts = [None] * count + ROWS["text"].to_pylist()[count:]
    job.write(ROWS.set_column(1, "text", pa.array(texts)))
    return job


def test_too_many_failed_rows_end_a_job(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    nulls(job, 7)
    assert main(job.command("--max-error-rate", "0.1", "--quiet")) == 1
    assert capfd.readouterr().err == (
        "llmbatch: max_error_rate is 0.1, and 7 of 60 rows have failed already (row 0: prompt is null): what is "
        "answered is kept; mend these rows or what failed them, and run the same command again with retry_errors=True "
        "(--retry-errors), or with a higher rate; with other options, start over (--restart)\n"
    )
    assert main(job.command("--max-error-rate", "0.1", "--quiet")) == 1
    assert main(job.command("--max-error-rate", "0.12", "--quiet")) == 0
    assert failed(job.answers()) == {f"row-{i}" for i in range(7)}


def test_a_job_that_was_ended_by_its_errors_goes_on_with_mended_rows(job: Job) -> None:
    whole = rows()
    with pytest.raises(JobError):
        nulls(job, 7).run(max_error_rate=0.1)
    job.write(whole)
    report = job.run(max_error_rate=0.1, retry_errors=True)
    assert (report.rows, report.errors) == (60, 0)
    assert job.answers().equals(job.undisturbed())


def test_as_many_as_are_allowed_do_not(job: Job) -> None:
    assert nulls(job, 6).run(max_error_rate=0.1).errors == 6


def test_a_mended_cause_and_a_retry_go_on_with_a_job_that_was_ended(job: Job, poison: Callable[[], None]) -> None:
    with pytest.raises(JobError):
        job.run(max_error_rate=0.02)
    kept = job.kept()
    assert kept & BAD
    poison()
    with begun() as answered:
        report = job.run(max_error_rate=0.02, retry_errors=True)
    assert not answered & (kept - BAD)
    assert report.errors == 0
    assert job.answers().equals(job.undisturbed())


def test_one_failed_row_ends_a_job_that_is_to_raise(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    nulls(job, 1)
    said = (
        "llmbatch: row 0 failed (null_prompt): prompt is null; on_error='column' (--on-error column) keeps such "
        "rows, with their error, and goes on\n"
    )
    for _ in range(2):
        assert main(job.command("--on-error", "raise", "--quiet")) == 1
        assert capfd.readouterr().err == said
    assert main(job.command("--quiet")) == 0
    assert failed(job.answers()) == {"row-0"}


# Rows that take too long


def test_a_row_that_takes_too_long_fails_and_may_be_run_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    with monkeypatch.context() as patch:
        patch.setattr("llmbatch.runtime.active_run.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
        report = job.run(row_timeout=30)
    answers = job.answers()
    late = failed(answers)
    assert 0 < len(late) < 60
    assert report.errors == len(late)
    wrong = answers.filter(pc.is_valid(answers["error"]))
    assert set(wrong["error_kind"].to_pylist()) == {"timeout"}
    assert set(wrong["error"].to_pylist()) == {
        "a row may run for row_timeout, 30 s, and this one was not done by then: raise row_timeout (--row-timeout) "
        "or lower max_tokens"
    }
    with begun() as answered:
        job.run(row_timeout=1000, retry_errors=True)
    assert answered == late
    assert job.answers().equals(job.undisturbed())
