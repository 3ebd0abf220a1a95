"""Disks and inputs that fail: a job ends with a clear error or recovers in full, and no row is wrong or lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import llmbatch.inference.answers.assembler
import llmbatch.inference.worker
from llmbatch.cli.main import main
from llmbatch.errors import DataError, StorageError
from llmbatch.storage.local import NewFile
from llmbatch.storage.retries import refusing
from tests.support.jobs import Job, begun, check_goes_on, contents, no_power_cuts, rows
from tests.support.killing import Process, run
from tests.support.models import tiny_model_folder
from tests.support.tokenizers import CHAT_TEMPLATE

RISK = {"llmbatch.inference.answers.assembler:ROWS_AT_RISK": 5}
# However slow the machine is: one record of a journal.
AT_ONCE = {f"llmbatch.inference.answers.assembler:{name}": 10**6 for name in ("SECONDS_AT_RISK", "_AT_FIRST")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=CHAT_TEMPLATE)


# Disks


@pytest.mark.parametrize(
    ("file_bytes", "patches", "name"),
    [(500, {}, "job.json"), (4000, RISK, "000-journal-00000"), (3200, AT_ONCE, "000-part-00000-00.parquet.staged")],
)
def test_what_a_disk_has_no_room_for_is_written_by_the_next_run(
    job: Job, file_bytes: int, patches: dict[str, int], name: str
) -> None:
    ended = run(Process(job.command("--quiet"), patches=patches, file_bytes=file_bytes))
    assert ended.status == 1
    assert ended.said == (
        f"llmbatch: {job.work / name} cannot be written: File too large: make room and run the same command again\n"
    )
    assert not list(job.out.glob("*.parquet"))
    check_goes_on(job, job.undisturbed())


@contextlib.contextmanager
def refusing_from(step: int, number: int) -> Iterator[None]:
    """From the `step`-th write on the disk refuses all of them."""
    steps = count()

    def refuse() -> None:
        if next(steps) >= step:
            raise OSError(number, os.strerror(number))

    def write(file: NewFile, data: Any) -> int:
        with refusing(file._what, "written"):
            refuse()
            return super(NewFile, file).write(data)

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        refuse()
        return put(descriptor, data, at)

    put = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NewFile, "write", write)
        patch.setattr(os, "pwrite", pwrite)
        yield


WAYS_OUT = {
    errno.ENOSPC: "No space left on device: make room and run the same command again",
    errno.EROFS: "Read-only file system: name a place that can be written",
    errno.EIO: "Input/output error",
}


def refusal(job: Job, step: int, number: int) -> str | None:
    """What a job says whose disk refuses from the `step`-th write on; None where it does not write so often."""
    try:
        with refusing_from(step, number):
            job.run()
    except (DataError, StorageError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", WAYS_OUT)
def test_a_disk_may_refuse_from_any_write_on(job: Job, number: int) -> None:
    job.write(rows(12))
    job = job.having(window_rows=7)
    expected = job.undisturbed()
    for step in count():
        mine = job.to(f"out{step}")
        said = refusal(mine, step, number)
        if said is None:
            assert step > 8
            return
        assert said.startswith(f"{mine.work}/")
        assert said.endswith(f" cannot be written: {WAYS_OUT[number]}")
        kept = mine.kept()
        with begun() as answered:
            mine.run()
        assert not answered & kept
        assert mine.answers().equals(expected)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of so many bytes is mounted on a folder."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_small_disk_that_is_full_and_then_grows(job: Job, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "32k"):
        mine = job.to("disk/out")
        ended = run(Process(mine.command("--quiet"), patches=RISK))
        assert ended.status == 1
        assert ended.said.startswith(f"llmbatch: {mine.work}/")
        assert ended.said.endswith(
            " cannot be written: No space left on device: make room and run the same command again\n"
        )
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        check_goes_on(mine, job.undisturbed())


@pytest.mark.slow
def test_a_disk_that_cannot_be_written(job: Job, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "1m"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        mine = job.to("disk/out")
        ended = run(Process(mine.command("--quiet")))
        assert ended.status == 2
        assert ended.said == (f"llmbatch: the output {mine.out} must lie where it can be written, but {disk} cannot\n")


def test_a_folder_that_may_not_be_written_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != job.folder)  # root may write anywhere
    before = contents(job.folder)
    assert main(job.command("--quiet")) == 2
    assert capfd.readouterr().err == (
        f"llmbatch: the output {job.out} must lie where it can be written, but {job.folder} cannot\n"
    )
    assert contents(job.folder) == before


# Inputs


@pytest.mark.parametrize("left", [0, 3, 200, -200, -8, -1])
def test_a_truncated_input_is_refused(job: Job, left: int, capfd: pytest.CaptureFixture[str]) -> None:
    job.source.write_bytes(job.source.read_bytes()[:left])
    assert main(job.command("--quiet")) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"llmbatch: {job.source} cannot be read as Parquet (")
    assert said.endswith("): write it again or leave it out\n")
    assert len(said.splitlines()) == 1
    assert not job.out.exists()


def test_an_input_that_is_damaged_inside_ends_the_job_and_once_restored_it_goes_on(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(rows(), job.source, row_group_size=20)
    whole = job.source.read_bytes()
    at = pq.ParquetFile(job.source).metadata.row_group(1).column(1).data_page_offset
    job.source.write_bytes(whole[:at] + bytes(40) + whole[at + 40 :])
    assert main(job.command("--quiet")) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"llmbatch: {job.source} cannot be read as Parquet (")
    assert len(said.splitlines()) == 1
    assert not list(job.out.glob("*.parquet"))
    job.source.write_bytes(whole)
    check_goes_on(job, job.undisturbed())


# Journals


@pytest.fixture
def short(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A short job of one window, on a disk that no power cut will be tried on."""
    no_power_cuts(monkeypatch)
    monkeypatch.setattr(llmbatch.inference.answers.assembler, "ROWS_AT_RISK", 2)
    job.write(rows(12))
    return job.having(window_rows=None, max_tokens=3, max_running=4)


def stopped(job: Job) -> tuple[Path, list[int]]:
    """The journal of a job that was asked to end, and where its records begin and the last one ends."""
    job.run_until(6)
    journal = job.work / "000-journal-00000"
    data = journal.read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b"\xffJ1\n", at)]
    assert len(starts) > 1
    return journal, [*starts, len(data)]


def check_every_cut(job: Job, stride: int) -> None:
    """Of a journal that is cut, the whole records count; what was cut off is run again."""
    expected = job.undisturbed()
    journal, (*_, last, end) = stopped(job)
    everything = job.kept()
    for left in sorted({*range(last, end, stride), *range(last, last + 17), end - 1, end}):
        mine = job.to(f"cut{left}")
        shutil.copytree(job.out, mine.out)
        os.truncate(mine.work / journal.name, left)
        assert (mine.kept() == everything) == (left == end)
        check_goes_on(mine, expected)
        shutil.rmtree(mine.out)


def test_a_journal_may_be_cut_at_any_byte_of_its_last_record(short: Job) -> None:
    check_every_cut(short, 150)


@pytest.mark.slow
def test_a_journal_may_be_cut_at_every_byte_of_its_last_record(short: Job) -> None:
    check_every_cut(short, 1)


def test_a_journal_that_is_damaged_inside_is_never_passed_over(short: Job, capfd: pytest.CaptureFixture[str]) -> None:
    journal, (first, *_) = stopped(short)
    data = bytearray(journal.read_bytes())
    data[first + 40] ^= 1
    journal.write_bytes(data)
    before = contents(short.folder)
    assert main(short.command("--quiet")) == 1
    assert capfd.readouterr().err == (
        f"llmbatch: {journal} is damaged at byte {first:,}, which no crash of a job does: "
        "remove it, and the rows it answers are run again\n"
    )
    assert contents(short.folder) == before
    journal.unlink()
    check_goes_on(short, short.undisturbed())
