"""Answers that have begun survive their process: they go on where they stood, and are those of an undisturbed job."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from llmbatch.errors import DataError, JobStopped
from llmbatch.inference.window import Window
from llmbatch.jobs.answer_writer import AnswerWriter
from llmbatch.jobs.resuming.begun_tokens import BegunTokens
from llmbatch.preprocess.request_batch import BegunAnswers
from llmbatch.runtime.protocols import Stop
from llmbatch.storage.location import Location
from tests.support.jobs import Job, check_goes_on, rows
from tests.support.killing import Moment, Process, run

TORCH = {"engine": "torch", "output_tokens": None, "max_tokens": 40, "window_rows": 60}
STEP = "llmbatch.engine.cpu.engine:CpuEngine.execute"
# What has begun is kept after each step, and the next one waits until that is written.
AT_EACH_STEP = {
    "llmbatch.inference.answers.assembler:_AT_FIRST": 0,
    "llmbatch.inference.answers.assembler:_SHARE": 0,
    "llmbatch.jobs.answer_writer:_BEHIND": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "of a seed": {"temperature": 1.0, "seed": 7},
    "several": {"temperature": 1.0, "n": 3},
    "stop": {"temperature": 1.0, "stop": ["a", "bc"]},
    "a form": {"temperature": 1.0, "structured_outputs": {"regex": "[a-h]{10,30}"}},
}


@pytest.fixture
def hasty(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a tiny model, that keeps what it has after each step."""
    monkeypatch.setattr("llmbatch.inference.answers.assembler._AT_FIRST", 0.0)
    monkeypatch.setattr("llmbatch.inference.answers.assembler._SHARE", 0.0)
    job.write(rows(12))
    return job.having(**TORCH)


def stops_after(steps: int, job: Job) -> bool:
    """Run a job, and stop it at once after so many steps; whether it was stopped before its end."""
    left = [steps]

    def after_step(writer: AnswerWriter) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Stop(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerWriter, "after_step", after_step)
        try:
            job.run()
        except JobStopped:
            return True
    return False


def kept(job: Job) -> BegunTokens:
    return BegunTokens.read(Location.at(str(job.work)))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_job_that_is_stopped_again_and_again_gives_the_answers_it_gives_undisturbed(
    hasty: Job, kind: dict[str, Any]
) -> None:
    job = hasty.having(**kind)
    expected, stops = job.undisturbed(), 0
    while stops_after(13, job):
        stops += 1
        assert stops < 60
        assert len(kept(job))
    assert stops > 1
    assert job.answers().equals(expected)


def test_no_token_is_computed_twice_but_those_of_the_last_step(hasty: Job) -> None:
    job = hasty.having(max_running=8)
    assert (
        run(Process(job.command("--quiet", "--ignore-eos"), Moment(STEP, 30), AT_EACH_STEP)).status == -signal.SIGKILL
    )
    tokens = kept(job).record["tokens"].value_lengths().to_pylist()
    assert len(tokens) == 8
    assert min(tokens) > 15
    check_goes_on(job.having(ignore_eos=True))


def test_what_an_answer_begins_with_is_no_part_of_its_prompt(hasty: Job) -> None:
    job = hasty.having(max_running=8, ignore_eos=True)
    undisturbed = hasty.to("undisturbed").having(ignore_eos=True).run()
    assert stops_after(20, job)
    assert len(kept(job))
    report = job.run()
    assert report.prefix_sharing_optimal == undisturbed.prefix_sharing_optimal
    assert (report.input_tokens, report.output_tokens) == (undisturbed.input_tokens, undisturbed.output_tokens)


def test_a_job_that_is_asked_to_end_at_once_keeps_all_that_was_generated(hasty: Job) -> None:
    job = hasty.having(max_running=8)
    asked = Process(job.command("--ignore-eos", "--grace", "0"), Moment(STEP, 30, number=signal.SIGTERM))
    assert run(asked).status == 143
    tokens = kept(job).record["tokens"].value_lengths().to_pylist()
    assert len(tokens) == 8
    assert min(tokens) > 25
    check_goes_on(job.having(ignore_eos=True))


def test_what_ends_is_kept_before_it_is_no_longer_among_what_has_begun(
    hasty: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: set[int] = set()
    under_way: set[int] = set()
    given: set[int] = set()
    begin, write, keep = AnswerWriter.begun, AnswerWriter.write, AnswerWriter.keep_begun

    def begun(writer: AnswerWriter, window: Window, rows: Any) -> None:
        given.update(rows.tolist())
        begin(writer, window, rows)

    def writing(writer: AnswerWriter, window: Window, batch: pa.RecordBatch) -> None:
        written.update(batch["row"].to_pylist())
        write(writer, window, batch)

    def keeping(writer: AnswerWriter, found: Sequence[tuple[Window, BegunAnswers]]) -> None:
        nonlocal under_way
        now = {row for _, answers in found for row in answers.rows.tolist()}
        assert under_way <= now | written
        assert not now & written
        assert now <= given
        under_way = now
        keep(writer, found)

    monkeypatch.setattr(AnswerWriter, "begun", begun)
    monkeypatch.setattr(AnswerWriter, "write", writing)
    monkeypatch.setattr(AnswerWriter, "keep_begun", keeping)
    hasty.having(engine="simulated", output_tokens="n", max_tokens=90).run()
    assert len(written) == 12


def test_rows_whose_windows_have_not_joined_keep_what_they_have(hasty: Job) -> None:
    job = hasty.having(window_rows=8, ignore_eos=True)
    expected = job.undisturbed()
    assert stops_after(12, job)
    before = kept(job)
    assert stops_after(2, job)
    assert len(before)
    assert set(before.record["key"].to_pylist()) <= set(kept(job).record["key"].to_pylist())
    job.run()
    assert job.answers().equals(expected)


def test_rows_that_tell_log_probabilities_begin_anew(hasty: Job) -> None:
    job = hasty.having(logprobs=1)
    assert stops_after(9, job)
    assert len(kept(job)) == 0
    check_goes_on(job)


def test_a_job_says_how_many_answers_go_on(hasty: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job = hasty.having(max_running=8)
    assert run(Process(job.command("--quiet"), Moment(STEP, 20), AT_EACH_STEP)).status == -signal.SIGKILL
    again = run(Process(job.command()))
    assert again.status == 0
    assert "8 answers that had begun go on where they stood" in again.said


def test_a_file_that_is_damaged_is_refused_with_a_way_out(hasty: Job) -> None:
    assert stops_after(9, hasty)
    file = hasty.work / "begun.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = (
        f"{file} is damaged, or another version's of llmbatch, which no crash of a job does: "
        f"remove {file}, and answers that have begun begin anew"
    )
    with pytest.raises(DataError, match=f"^{re.escape(said)}$"):
        hasty.run()
    file.unlink()
    check_goes_on(hasty)


def test_answers_are_found_again_by_keys_and_contents(tmp_path: Path) -> None:
    class Rows:
        keys = np.array([11, 22, 33, 44], np.uint64)
        contents = np.array([1, 2, 3, 4], np.uint64)

    tokens = [np.array(one, np.int32) for one in ([5], [6, 7], [8, 9, 10])]
    begun = BegunAnswers(np.array([3, 1, 1], np.int32), np.array([0, 0, 2], np.int32), tokens)
    place = Location.at(str(tmp_path))
    BegunTokens.of([(cast(Window, Rows), begun)]).write(place)
    read = BegunTokens.read(place)
    found = read.of_window(np.array([44, 22, 5], np.uint64), np.array([4, 99, 5], np.uint64))
    assert (found.rows.tolist(), found.asks.tolist(), [one.tolist() for one in found.tokens]) == ([0], [0], [[5]])
    assert len(read.of_window(np.empty(0, np.uint64), np.empty(0, np.uint64)).rows) == 0
    assert len(read.without(np.array([22], np.uint64)).joined(read)) == 4
    assert len(BegunTokens.read(Location.at(str(tmp_path / "none")))) == 0
