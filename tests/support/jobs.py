"""A small job to disturb: its input, its command, and what it has answered."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import llmbatch
import llmbatch.inference.answers.assembler
import llmbatch.inference.worker
from llmbatch.cli.main import main
from llmbatch.errors import JobStopped
from llmbatch.inference.progress import Advance, Silence
from llmbatch.inference.report import Report
from llmbatch.inference.window import Window
from llmbatch.jobs.answer_writer import AnswerWriter
from llmbatch.jobs.resuming.prior_answers import keys_of
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location

# Ways out that messages name.
OVER = "start over with restart=True (--restart)"
OTHER = f"choose another output, or {OVER}"

# Of an answer, what does not depend on the rows that were run beside it.
SAME = ("num_input_tokens", "generated_text", "num_generated_tokens", "finish_reason", "error", "error_kind")


def rows(count: int = 60) -> pa.Table:
    """Rows whose prompts share prefixes, and of whose answers no two are equal when they are simulated."""
    numbers = range(count)
    ids = [f"row-{i}" for i in numbers]
    texts = ["abcdefgh"[: 1 + i % 4] * 4 + str(i) for i in numbers]
    lengths = [1 + i * 37 % 60 + i // 60 * 60 for i in numbers]
    return pa.table(
        {"id": pa.array(ids, pa.string()), "text": pa.array(texts, pa.string()), "n": pa.array(lengths, pa.int64())}
    )


@dataclass(frozen=True)
class Job:
    """A job on rows in `folder`."""

    model: str
    folder: Path
    name: str = "out"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        return self.folder / "in.parquet"

    @property
    def out(self) -> Path:
        return self.folder / self.name

    @property
    def work(self) -> Path:
        return self.out / "_llmbatch" if not self.out.suffix else self.folder / f"{self.name}._llmbatch"

    @property
    def manifest(self) -> Path:
        return self.out / "_llmbatch.parquet" if not self.out.suffix else self.folder / f"{self.name}._llmbatch.json"

    def to(self, name: str) -> Job:
        """The same job with another output."""
        return replace(self, name=name)

    def having(self, **options: Any) -> Job:
        """The job with other options; None leaves one out."""
        return replace(self, options={**self.options, **options})

    def write(self, table: pa.Table) -> None:
        """Make this the input."""
        pq.write_table(table, self.source)

    def run(self, **options: Any) -> Report:
        """Run it in this process."""
        given = {"output": str(self.out), **self.options, **options}
        given = {key: value for key, value in given.items() if value is not None}
        return llmbatch.run(str(self.source), model=self.model, **given)

    def run_until(self, answered: int, **options: Any) -> None:
        """Run it until so many rows are answered at least, and ask it to end."""
        stopping = StopRequest()
        with pytest.raises(JobStopped):
            self.run(progress=_Asking(answered, stopping), stopping=stopping, **options)

    def command(self, *more: str) -> list[str]:
        """Arguments of `llmbatch` for it."""
        words = ["run", str(self.source), "--output", str(self.out), "--model", self.model]
        for key, value in self.options.items():
            words += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
        return [*words, *more]

    def answers(self) -> pa.Table:
        """What it wrote."""
        return pq.read_table(self.out).select(["id", *SAME])

    def undisturbed(self) -> pa.Table:
        """What it writes to another output, where nothing comes between."""
        whole = self.to("undisturbed")
        whole.run()
        return whole.answers()

    def kept(self) -> set[str]:
        """Ids of the rows that are in journals or parts."""
        every = rows(1000)
        keys = (keys_of(every, 0, column) for column in (None, "id"))
        ids = {key: name for column in keys for key, name in zip(column.tolist(), every["id"].to_pylist())}
        place = Location.at(str(self.work))
        journals = [name for name in place.names() if re.fullmatch(r"\d+-journal-\d+", name)]
        records = [record for name in journals for record in Journal.open(place, name).records()]
        final = [self.out] if self.out.is_file() else self.out.glob("*.parquet")
        parts = [*self.work.glob("*.parquet.staged"), *final]
        found = {ids[key] for record in records for key in record["key"].to_pylist()}
        return found.union(*(pq.read_table(part)["id"].to_pylist() for part in parts))


@dataclass(slots=True)
class _Asking(Silence):
    """Asks a job to end when so many rows are answered."""

    rows: int
    stopping: StopRequest

    def advance(self, done: Advance) -> None:
        if done.rows >= self.rows:
            self.stopping.ask()


def small_job(model: str, folder: Path, patch: pytest.MonkeyPatch) -> Job:
    """A job on sixty rows in three windows, simulated, of whose answers five at most are at risk."""
    patch.setattr(llmbatch.inference.answers.assembler, "ROWS_AT_RISK", 5)
    simulated = {"engine": "simulated", "output_tokens": "n", "max_tokens": 90}
    limits = {"kv_memory": 2**22, "window_rows": 20, "max_running": 16}
    job = Job(model, folder, options={"prompt": "text", "dtype": "float32", **simulated, **limits})
    job.write(rows())
    return job


def no_power_cuts(patch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk any more."""
    for name in ("fsync", "fdatasync"):
        patch.setattr(os, name, lambda descriptor: None)


@contextmanager
def begun() -> Iterator[set[str]]:
    """Ids of the rows that are given to an engine while the block runs."""
    ids: set[str] = set()

    def note(book: AnswerWriter, window: Window, given: NDArray[np.int32]) -> None:
        ids.update(window.table["id"].take(pa.array(given)).to_pylist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerWriter, "begun", note)
        yield ids


def check_goes_on(job: Job, expected: pa.Table | None = None, **options: Any) -> None:
    """The next run answers exactly the rows that are not kept, and then all is as if nothing had happened.

    `expected` are the answers of the job where nothing comes between.
    """
    every = set(pq.read_table(job.source)["id"].to_pylist())
    kept = job.kept() & every
    with begun() as answered:
        report = job.run(**options)
    assert answered == every - kept
    assert (report.rows, report.rows_resumed, report.finished_before) == (len(every), len(kept), False)
    expected = job.undisturbed() if expected is None else expected
    assert job.answers().sort_by("id").equals(expected.sort_by("id"))
    if job.options.get("preserve_order", True):
        assert job.answers()["id"].equals(pq.read_table(job.source)["id"])
    assert not job.work.exists()


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by its path; a folder's bytes are None."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: None if path.is_dir() else path.read_bytes() for name, path in found.items()}


def check_refused(job: Job, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 2 and this sentence, and nothing on the disk has changed."""
    before = contents(job.folder)
    capfd.readouterr()
    assert main(job.command()) == 2
    assert capfd.readouterr().err == f"llmbatch: {said}\n"
    assert contents(job.folder) == before


def of_small_windows(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A short job of two windows and several parts."""
    monkeypatch.setattr("llmbatch.jobs.part_builder.PART_ROWS", 3)
    monkeypatch.setattr("llmbatch.inference.answers.assembler.ROWS_AT_RISK", 2)
    job.write(rows(12))
    return job.having(window_rows=7)
