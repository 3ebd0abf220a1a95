"""Jobs that die and are run again: no row is missing, none is there twice, none that was kept is answered again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from llmbatch.cli.main import main
from llmbatch.storage.location import Location
from llmbatch.storage.lock import Owner
from tests.support.dying import Killed
from tests.support.jobs import SAME, Job, begun, check_goes_on, contents, no_power_cuts, rows
from tests.support.killing import Moment, Process, run, running

RISK = {"llmbatch.inference.answers.assembler:ROWS_AT_RISK": 5}
STEP = "llmbatch.engine.recorded:RecordedEngine.execute"
TORCH_STEP = "llmbatch.engine.cpu.engine:CpuEngine.execute"
APPEND = "llmbatch.storage.journal:_FileJournal.append"
STAGE = "llmbatch.io.writing.output:Output.stage"
MOVE = "llmbatch.storage.location:Location.move"
TORCH = {"engine": "torch", "output_tokens": None, "max_tokens": 12}


@pytest.mark.parametrize(
    ("at", "kept"),
    [
        (Moment(STEP, 3), range(1)),
        (Moment(APPEND, 2), range(2, 20)),
        (Moment(APPEND, 2, after=True), range(3, 20)),
        (Moment(STAGE, 1), range(20, 60)),
        (Moment(STAGE, 2, after=True), range(60, 61)),
    ],
)
def test_a_job_that_is_killed_goes_on_where_it_was(job: Job, at: Moment, kept: range) -> None:
    assert run(Process(job.command("--quiet"), at, RISK)).status == -signal.SIGKILL
    assert len(job.kept()) in kept
    check_goes_on(job)


@pytest.mark.parametrize("at", [Moment(TORCH_STEP, 30), Moment(APPEND, 3, after=True)])
def test_a_model_gives_the_answers_it_gives_undisturbed(job: Job, at: Moment) -> None:
    job = job.having(**TORCH)
    assert run(Process(job.command("--quiet"), at, RISK)).status == -signal.SIGKILL
    assert 0 < len(job.kept()) < 60
    check_goes_on(job)


@pytest.mark.parametrize("at", [Moment(MOVE), Moment(MOVE, 1, after=True), Moment(MOVE, 3, after=True)])
def test_a_job_that_is_killed_while_it_ends_is_ended_by_the_next_run(job: Job, at: Moment) -> None:
    assert run(Process(job.command("--quiet"), at, RISK)).status == -signal.SIGKILL
    with begun() as answered:
        assert job.run().finished_before
    assert not answered
    assert job.answers().equals(job.undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_job_may_be_killed_again_and_again(job: Job, seed: int) -> None:
    job = job.having(**TORCH)
    rng = np.random.default_rng(seed)
    kills = 0
    while True:
        at = Moment(TORCH_STEP, int(rng.integers(8, 20)))
        status = run(Process(job.command("--quiet"), at, RISK)).status
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 2
    assert job.answers().equals(job.undisturbed())


# Deaths at every change of the disk

ON_DISK = ("replace", "link", "unlink", "remove", "pwrite", "ftruncate", "makedirs", "rmdir")
IN_STORE = ("write", "create", "writing", "move", "remove", "clear")


@contextlib.contextmanager
def dying_at(step: int, owner: object, changes: Sequence[str]) -> Iterator[None]:
    """The `step`-th change is half made, if it has halves, and all later ones are not made at all.

    A lock that is taken here is that of a process that is gone.
    """
    steps = count()
    here = Owner.here

    def dying(name: str) -> Callable[..., Any]:
        change = getattr(owner, name)

        def die(*args: Any, **options: Any) -> Any:
            now = next(steps)
            if now < step:
                return change(*args, **options)
            if now == step and name == "pwrite":
                descriptor, data, at = args
                change(descriptor, data[: len(data) // 2], at)
            if now == step and name == "move" and args[0].size(args[1]) is not None:
                place, old, target, new = args
                place.filesystem.cp_file(place.path(old), target.path(new))
            raise Killed

        return die

    with pytest.MonkeyPatch.context() as patch:
        for name in changes:
            patch.setattr(owner, name, dying(name))
        patch.setattr(Owner, "here", lambda: replace(here(), started=0))
        yield


@dataclass(frozen=True)
class Deaths:
    """A job whose every change is its last one, on one output after the other."""

    job: Job
    url: str  # what the outputs lie in
    owner: object
    changes: Sequence[str]

    def check(self, *, again: bool) -> None:
        """Each goes on to the answers of one that is undisturbed, `again` after one that died at the same change.

        Of its work nothing is left but, on a disk, what was hidden because it was not whole.
        """
        expected = self.job.undisturbed().sort_by("id")
        for step in count():
            url = f"{self.url}/{step}/{self.job.name}"
            if not self._dies_at(step, url):
                assert step > 30
                return
            self._check_seen(url, expected)
            if again:
                self._dies_at(step, url)
                self._check_seen(url, expected)
            self.job.run(output=url)
            assert read(url).sort_by("id").equals(expected)
            assert not self._work(url)

    def _dies_at(self, step: int, url: str) -> bool:
        try:
            with dying_at(step, self.owner, self.changes):
                self.job.run(output=url)
        except Killed:
            return True
        return False

    def _work(self, url: str) -> list[str]:
        return Location.at(f"{url}._llmbatch" if self.job.out.suffix else f"{url}/_llmbatch").names()

    def _check_seen(self, url: str, expected: pa.Table) -> None:
        """A manifest says that all is there; without one a reader of one file sees nothing."""
        files, path = fsspec.url_to_fs(url)
        manifest = f"{path}._llmbatch.json" if self.job.out.suffix else f"{path}/_llmbatch.parquet"
        if files.exists(manifest):
            assert read(url).sort_by("id").equals(expected)


def read(url: str) -> pa.Table:
    """The answers that a plain reader finds."""
    files, path = fsspec.url_to_fs(url)
    return ds.dataset(path, filesystem=files, format="parquet").to_table(["id", *SAME])


@pytest.fixture
def hasty(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A short job of two windows and several parts, on a disk that no power cut will be tried on."""
    no_power_cuts(monkeypatch)
    monkeypatch.setattr("llmbatch.jobs.part_builder.PART_ROWS", 3)
    job.write(rows(12))
    return job.having(window_rows=7)


def on_disk(job: Job) -> Deaths:
    return Deaths(job, str(job.folder), os, ON_DISK)


def in_store(job: Job) -> Deaths:
    return Deaths(job, f"memory://{uuid.uuid4().hex}", Location, IN_STORE)


@pytest.mark.parametrize("place", [on_disk, in_store])
def test_a_job_may_die_at_every_change(hasty: Job, place: Callable[[Job], Deaths]) -> None:
    place(hasty).check(again=False)


@pytest.mark.slow
@pytest.mark.parametrize("place", [on_disk, in_store])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out", {}),
        ("out", {"id_column": "id"}),
        ("out", {"preserve_order": False}),
        ("out", {"preserve_order": False, "id_column": "id"}),
        ("out.parquet", {}),
        ("out.parquet", {"preserve_order": False}),
    ],
)
def test_a_job_may_die_there_again(
    hasty: Job, place: Callable[[Job], Deaths], name: str, options: dict[str, Any]
) -> None:
    place(hasty.to(name).having(**options)).check(again=True)


# Locks


def test_a_second_run_is_refused_while_the_first_one_writes(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    with running(Process(job.command("--quiet"), Moment(STEP, 9, number=signal.SIGSTOP), RISK)) as wait:
        before = contents(job.folder)
        assert main(job.command()) == 2
        told = capfd.readouterr().err
        assert contents(job.folder) == before
        assert wait().status == 0
    pid = re.escape(f"the output {job.out} is being written by process ") + r"\d+ on \S+: "
    assert re.fullmatch(f"llmbatch: {pid}end that process or wait until it ends, or name another output\n", told), told
    assert job.answers().equals(job.undisturbed())


def test_the_lock_of_a_process_that_is_gone_is_taken_over(job: Job) -> None:
    run(Process(job.command("--quiet"), Moment(STEP, 9), RISK))
    assert list(job.work.glob("lock-000001-*"))
    job.run()
    assert not job.work.exists()


# SIGTERM


@pytest.mark.parametrize("grace", ["0", "60"])
def test_a_job_that_is_asked_to_end_says_what_is_kept_and_goes_on_later(job: Job, grace: str) -> None:
    ended = run(Process(job.command("--grace", grace), Moment(STEP, 30, number=signal.SIGTERM), RISK))
    kept = len(job.kept())
    assert ended.status == 143
    assert kept > 0
    assert ended.said.endswith(
        f"llmbatch: the job was asked to end: {kept} of 60 rows are answered and kept in {job.work}, "
        "and the same command goes on\n"
    )
    check_goes_on(job)
