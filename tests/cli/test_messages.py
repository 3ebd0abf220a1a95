"""What the command line says and how it ends: its exit statuses, its signals, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import DataError, JobStopped, StoppedEarly
from llmbatch.inference.progress import Silence
from llmbatch.jobs.answer_writer import AnswerWriter
from llmbatch.jobs.window_loader import WindowLoader
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.runtime.cancellation import StopRequest, heard
from llmbatch.runtime.protocols import Stop
from llmbatch.system.cancel_signal import CancelSignal
from tests.support.jobs import Job, check_refused, rows
from tests.support.tokenizers import save_fast

# Exit statuses


def failed(job: Job) -> str:
    return (
        f"llmbatch: every row failed (2; row 0: prompt is empty): see the column error in {job.out}, or of a batch the "
        "file of errors beside it; mend the cause, and start over with --restart, which loses no answer\n"
    )


def without_prompts(job: Job) -> Job:
    job.write(pa.table({"id": ["a", "b"], "text": ["", None], "n": [1, 2]}))
    return job


def test_where_every_row_fails_the_status_is_3_and_that_is_said_even_to_the_quiet(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job = without_prompts(job)
    assert main(job.command("--quiet")) == 3
    assert capfd.readouterr() == ("", failed(job))
    assert pq.read_table(job.out)["error"].null_count == 0
    assert main(job.command("--quiet", "--json")) == 3  # finished already, and still without an answer
    printed = capfd.readouterr()
    assert json.loads(printed.out)["errors"] == 2
    assert printed.err == (f"llmbatch: the output {job.out} is finished already; --restart starts over\n" + failed(job))


def test_where_every_row_failed_the_command_that_is_named_answers_mended_rows(job: Job) -> None:
    job = without_prompts(job)
    assert main(job.command("--quiet")) == 3
    job.write(pa.table({"id": ["a", "b"], "text": ["one", "two"], "n": [1, 2]}))
    assert main(job.having(max_tokens=40).command("--quiet", "--restart")) == 0
    assert pq.read_table(job.out)["error"].null_count == 2


def test_where_one_row_has_an_answer_or_there_is_none_the_status_is_0(job: Job) -> None:
    job.write(rows(1).append_column("x", pa.array([1])))
    assert main(job.command("--quiet")) == 0
    job = job.to("none")
    job.write(rows(0))
    assert main(job.command("--quiet")) == 0


def test_help_tells_the_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    for status in (
        "0    done",
        "1    the job failed",
        "2    the command",
        "3    done, but every row failed",
        "130",
        "143",
    ):
        assert f"\n  {status}" in said


def test_figures_that_cannot_be_written_are_an_error(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job.write(rows(1))
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(job.command("--quiet", "--json")) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert capfd.readouterr().err.startswith("llmbatch: standard output must take what is printed, but it cannot be ")


def test_who_interrupts_before_a_command_can_hear_it_sees_a_sentence() -> None:
    program = """
import llmbatch.__main__ as process
def interrupted():
    raise KeyboardInterrupt
process.tune_process = interrupted
process.command()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "llmbatch: interrupted\n")


# Input that is not as it should be


def test_a_row_that_is_not_utf8_leaves_the_others_their_answers(job: Job) -> None:
    texts = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    job.write(pa.table({"id": ["a", "b", "c"], "text": texts, "n": [1, 2, 3]}))
    report = job.run()
    assert (report.rows, report.errors) == (3, 1)
    assert pq.read_table(job.out, columns=["error_kind"])["error_kind"].to_pylist() == [None, "encoding", None]


def test_lengths_beyond_int64_are_the_most_there_may_be(job: Job) -> None:
    job.write(rows(2).set_column(2, "n", pa.array([2**64 - 1, 3], pa.uint64())))
    job.run()
    assert job.answers()["num_generated_tokens"].to_pylist() == [90, 3]


def test_input_that_is_nested_too_deeply_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def deep(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr("llmbatch.io.reading.dataset.Dataset.resolve", deep)
    check_refused(job, "the input is nested too deeply to be read: flatten it", capfd)


def test_a_template_that_is_not_utf8_is_refused(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    job = job.having(prompt=None, template=os.fsdecode(b"{text}\xff"))
    check_refused(job, "template must be valid UTF-8, got '{text}\\udcff' (surrogates not allowed)", capfd)


# Where the output lies


def test_a_tilde_is_the_home_of_the_output_as_of_the_input(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(job.folder))
    monkeypatch.chdir(job.folder)
    command = [word.replace(str(job.folder), "~") for word in job.command("--quiet")]
    assert "~/out" in command
    assert main(command) == 0
    assert job.manifest.exists()
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("*.parquet", "out.parquet"),
        ("[a-z]*", "out.parquet"),
        ("**/*.parquet", "below/out.parquet"),
        ("*/*.parquet", "out"),
        ("o*", "out"),
    ],
)
def test_an_output_that_the_input_would_match_is_refused(
    job: Job, pattern: str, out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (job.folder / "other").mkdir()
    pq.write_table(rows(2), job.folder / "other" / "one.parquet")
    pq.write_table(rows(2), job.folder / "one.parquet")
    command = job.to(out).command()
    command[1] = f"{job.folder}/{pattern}"
    assert main(command) == 2
    assert capfd.readouterr().err == (
        f"llmbatch: the output must not match an input, but {job.folder}/{pattern} matches {job.folder}/{out}, and the "
        "answers would be read as input the next time: choose another place\n"
    )


def test_an_output_beside_what_the_input_matches_is_fine(job: Job) -> None:
    command = job.to("answers.parquet").command("--quiet")
    command[1] = f"{job.folder}/i*.parquet"
    assert main(command) == 0
    assert main(command) == 0


# What is said of answers that are there


class Said(Silence):
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_a_job_that_goes_on_says_how_many_rows_are_answered(job: Job) -> None:
    job.run_until(25)
    said = Said()
    kept = len(job.kept())
    job.run(progress=said)
    assert f"going on with a job of which {kept} of 60 rows are answered" in said.sentences


def test_answers_of_rows_that_are_gone_are_not_counted_as_the_inputs(job: Job) -> None:
    job = job.having(id_column="id")
    job.write(rows(2))
    job.run()
    job.write(rows(4).slice(2))
    said = Said()
    report = job.run(progress=said)
    assert report.rows_resumed == 0
    assert not [sentence for sentence in said.sentences if "of 2 rows are answered" in sentence]
    assert (
        "going on with answers that are there already: those of rows that are as they were are kept" in said.sentences
    )


# Being asked to end


def test_a_job_that_is_being_made_ready_ends_when_it_is_asked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = StopRequest()
    monkeypatch.setattr("llmbatch.inference.worker.Worker.load", lambda worker: stopping.interrupt())
    with pytest.raises(StoppedEarly):
        job.run(stopping=stopping)
    assert not job.out.exists()


def test_a_window_in_the_making_is_given_up_when_the_job_is_asked_to_end(job: Job) -> None:
    stopping = StopRequest()

    class Asks(Silence):
        def start(self, rows: int) -> None:
            stopping.ask()

    with pytest.raises(JobStopped) as caught:
        job.run(progress=Asks(), stopping=stopping)
    assert str(caught.value) == (
        f"the job was asked to end: 0 of 60 rows are answered and kept in {job.work}, and the same command goes on"
    )
    assert job.run().rows == 60


def endless(cancelled: CancelSignal, begun: threading.Event) -> Any:
    """Make a window that takes for ever."""
    while True:
        begun.set()
        cancelled.check()


def test_who_waits_for_a_window_hears_that_the_job_is_to_end() -> None:
    stopping, begun = StopRequest(7.0), threading.Event()
    windows = WindowLoader.start([0, 1], lambda number, cancelled: endless(cancelled, begun), stopping)
    begun.wait()
    stopping.ask()
    with pytest.raises(Stop) as caught:
        windows.next(wait=True)
    assert caught.value.deadline == stopping.deadline
    windows.close()  # comes back although the window is not made


class CountedSignal(CancelSignal):
    """Counts how often it is checked."""

    checks = 0

    def check(self) -> None:
        self.checks += 1


def test_rendering_and_tokenising_look_up_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(save_fast(tmp_path))
    signal = CountedSignal()
    PromptSource(prompt="x").render(pa.table({"x": ["a"] * 10}), tokenizer, signal)
    assert signal.checks == 10
    signal.checks = 0
    monkeypatch.setattr("llmbatch.preprocess.tokenization.tokenizer._BATCH_LETTERS", 10)
    column = tokenizer.encode(["four"] * 9 + ["twelve letters", ""], False, cancelled=signal)
    assert signal.checks == 7
    assert column.offsets.tolist() == [*range(0, 37, 4), 50, 50]


SLOW = "{% for i in range(3000000) %}{% endfor %}{{ messages[0].content }}"  # a chat takes a part of a second


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGINT, 130, "interrupted; what a job has answered is kept, and the same command goes on with it\n"),
        (signal.SIGTERM, 143, "0 of 5,000 rows are answered and kept in {work}, and the same command goes on\n"),
    ],
)
def test_one_signal_ends_a_job_whose_first_window_is_being_rendered(
    job: Job, number: signal.Signals, status: int, last: str
) -> None:
    job.write(pa.table({"text": [f"row {i}" for i in range(5000)], "n": [1] * 5000}))
    slow = json.dumps({"chat_template": SLOW})
    command = job.having(window_rows=None).command("--chat", "--chat-template-kwargs", slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "llmbatch", *command], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stderr is not None
        before = list(takewhile(lambda line: "5,000 rows to answer" not in line, process.stderr))
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, before
    assert said.endswith(last.format(work=job.work))
    assert "Traceback" not in said


class Going:
    """Is interrupted as it goes, where nothing can be raised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("interrupted_by", [interrupt, Going])
def test_an_interrupt_ends_the_job_after_the_step_and_raises_nothing_in_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], interrupted_by: Callable[[], object]
) -> None:
    steps, after_step = count(), AnswerWriter.after_step

    def interrupted(writer: AnswerWriter) -> None:
        if next(steps) == 30:
            interrupted_by()
        after_step(writer)

    monkeypatch.setattr(AnswerWriter, "after_step", interrupted)
    assert main(job.command("--quiet")) == 130
    said = "interrupted; what a job has answered is kept, and the same command goes on with it"
    assert capfd.readouterr().err == f"llmbatch: {said}\n"
    assert main(job.command("--quiet")) == 0
    assert job.answers().equals(job.undisturbed())


def test_an_interrupt_in_whose_place_another_error_comes_is_one() -> None:
    def compiled() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemError("bad argument to internal function") from None

    with pytest.raises(KeyboardInterrupt), heard(StopRequest()):
        compiled()


def test_a_second_interrupt_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr("llmbatch.runtime.cancellation.os._exit", ends.append)
    handler = signal.getsignal(signal.SIGINT)
    with heard(StopRequest()):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert ends == []
        signal.raise_signal(signal.SIGINT)
    assert ends == [130]
    assert signal.getsignal(signal.SIGINT) is handler


WAITING = """
import threading
from llmbatch.kernels.cpu.workers import Team, arrivals, have_arrived, wait_for_all
from llmbatch.runtime.cancellation import StopRequest, heard

def tell():
    while not have_arrived(team, 1):
        pass
    print("waiting", flush=True)

team = Team(arrivals(), 2, 0)
with heard(StopRequest()):
    threading.Thread(target=tell).start()
    wait_for_all(team)
"""


def test_a_second_interrupt_does_not_wait_for_a_step() -> None:
    """The main thread waits at a barrier for a worker that never comes."""
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        while process.poll() is None:  # two that come at the same time are one
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
    assert process.returncode == 130


def test_a_job_that_is_asked_to_end_early_has_status_143(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmbatch.inference.worker.Worker.load", lambda worker: signal.raise_signal(signal.SIGTERM))
    assert main(job.command()) == 143
    assert capfd.readouterr().err.splitlines()[-1] == (
        "llmbatch: stopped before any row was run: answers of earlier runs are kept, and the same command goes on with "
        "them"
    )


def test_an_error_of_the_input_is_one_sentence(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise DataError("a file is broken")

    monkeypatch.setattr("llmbatch.io.reading.dataset.Dataset.resolve", broken)
    check_refused(job, "a file is broken", capfd)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["simulate", "x.parquet", "--requests", "some"], "llmbatch simulate --help"),
        (["simulate", "--online", "x.parquet", "--tpot", "soon"], "llmbatch simulate --online x --help"),
    ],
)
def test_a_value_that_is_wrong_points_to_the_help_that_lists_it(
    words: list[str], where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capfd.readouterr().err.endswith(f" (see {where})\n")
