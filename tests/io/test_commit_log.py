"""Outputs whose commit, or whose removal, dies anywhere and is gone through with by whoever comes next."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest

from llmbatch.io.writing.output import Output
from llmbatch.io.writing.work_files import JOB
from tests.support.dying import killed
from tests.support.outputs import commit, open_output, stage

OLD = pa.table({"id": [-1, -2, -3, -4, -5], "generated_text": ["old"] * 5})
NEW = pa.table({"id": [1, 2, 3], "generated_text": ["a", "b", "c"]})
Places = Callable[[str], Callable[[], str]]
NAMES = ("out", "out.parquet", "out.jsonl.zst")


class Job:
    """A job at the point where all is staged, on an output of a kind; the old one holds five rows."""

    def __init__(self, url: str, *, replaces: str, published: bool = False) -> None:
        self.url = url
        self.files, self.root = fsspec.url_to_fs(url.rpartition("/")[0])
        if replaces == "ours":
            self.begin(OLD)
            self.commit()
        if replaces == "foreign":
            self.files.makedirs(f"{self.root}/out", exist_ok=True)
            for name in ("part-00001", "data"):
                with self.files.open(f"{self.root}/out/{name}.parquet", "wb") as file:
                    pq.write_table(OLD, file)
        self.old = self.tree()
        self.begin(NEW)
        if published:
            self.open().publish(self.parts[1].name, "part-00000.parquet")

    def open(self) -> Output:
        return open_output(self.url)

    def begin(self, table: pa.Table) -> None:
        output = self.open()
        output.work.make()
        output.begin()
        output.work.write(JOB, b"{}")
        self.parts = stage(output, table)

    def commit(self) -> None:
        commit(self.open(), self.parts)

    def rebind(self) -> None:
        """What the next process does."""
        output = self.open()
        output.resume_ending()
        if output.has_work():
            self.commit()

    def resume(self) -> None:
        self.open().resume_ending()

    def restart(self) -> None:
        self.open().start_over()

    def start_anew(self) -> None:
        """What the next process does of a job that starts over."""
        self.resume()
        assert not self.open().has_work()
        self.begin(NEW)
        self.commit()

    def tree(self) -> set[str]:
        """Files, also those in the making."""
        return {path.removeprefix(self.root).strip("/") for path in self.files.find(self.root)}

    def rows_of(self, name: str) -> list[int]:
        """Values of `id` in one file."""
        data = self.files.cat_file(f"{self.root}/{name}")
        if name.endswith(".parquet"):
            return list(pq.read_table(pa.BufferReader(data))["id"].to_pylist())
        text = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        return list(pyarrow.json.read_json(pa.BufferReader(text))["id"].to_pylist())

    def seen(self) -> list[int]:
        """Rows that a plain reader sees."""
        visible = sorted(name for name in self.tree() if not name.endswith((".json", ".staged", "_llmbatch.parquet")))
        return [value for name in visible for value in self.rows_of(name)]

    def check_whole_or_none(self) -> None:
        """No reader sees rows of two jobs, and rows that a manifest speaks of are all there."""
        values = self.seen()
        assert all(value < 0 for value in values) or all(value > 0 for value in values)
        manifest = self.open().manifest()
        if manifest is not None:
            assert len(values) == sum(part["rows"] for part in manifest["parts"]) == manifest["rows"]

    def check_finished(self) -> None:
        manifest = self.open().manifest()
        assert manifest is not None
        parts = [part["name"] for part in manifest["parts"]]
        folder = "out/" if self.url.endswith("/out") else ""
        own = [f"{folder}{name}" for name in parts]
        assert [value for name in own for value in self.rows_of(name)] == NEW["id"].to_pylist()
        assert self.tree() == {*own, "out/_llmbatch.parquet" if folder else f"{parts[0]}._llmbatch.json"}
        assert not self.open().has_work()


def deaths(
    urls: Callable[[], str], first: Callable[[Job], None], then: Callable[[Job], None], *, twice: bool, **options: Any
) -> Iterator[Job]:
    """Jobs that died at each step, perhaps again at each step of what was done then, and that have ended now."""
    for step in count():
        for again in count():
            job = Job(urls(), **options)
            before = job.tree()
            if not killed(step, partial(first, job)):
                assert step > 3
                return
            job.check_whole_or_none()
            if job.tree() == before:  # it had done nothing
                break
            died_again = twice and killed(again, partial(then, job))
            job.check_whole_or_none()
            then(job)
            yield job
            if not died_again:
                break


def on_disk(folder: Path) -> Places:
    return lambda name: lambda: f"{folder}/{uuid.uuid4().hex}/{name}"


def in_memory(folder: Path) -> Places:
    """A store that copies where a disk renames."""
    return lambda name: lambda: f"memory://{folder.name}/{uuid.uuid4().hex}/{name}"


@pytest.fixture(params=[on_disk, in_memory])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    """For a name, places that have it."""
    made: Places = request.param(tmp_path)
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replaces", ["nothing", "ours"])
def test_a_commit_that_dies_anywhere_is_gone_through_with(places: Places, name: str, replaces: str) -> None:
    for job in deaths(places(name), Job.commit, Job.rebind, twice=False, replaces=replaces):
        job.check_finished()


@pytest.mark.parametrize("name", NAMES)
def test_so_is_one_that_dies_again(tmp_path: Path, name: str) -> None:
    for job in deaths(in_memory(tmp_path)(name), Job.commit, Job.rebind, twice=True, replaces="ours"):
        job.check_finished()


@pytest.mark.parametrize("options", [{"replaces": "foreign"}, {"replaces": "nothing", "published": True}])
def test_so_is_one_that_replaces_foreign_parts_or_finds_some_published(places: Places, options: dict[str, Any]) -> None:
    for job in deaths(places("out"), Job.commit, Job.rebind, twice=False, **options):
        job.check_finished()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("then", [Job.restart, Job.resume])
def test_a_job_that_dies_when_it_starts_over_has_lost_nothing_that_was_finished(
    places: Places, name: str, then: Callable[[Job], None]
) -> None:
    for job in deaths(places(name), Job.restart, then, twice=False, replaces="ours"):
        assert job.old <= job.tree()
        assert job.seen() == OLD["id"].to_pylist()
        job.open().check_free(replace_foreign=False)
        job.start_anew()
        job.check_finished()


def test_so_does_one_that_dies_again_while_it_is_gone_through_with(tmp_path: Path) -> None:
    for job in deaths(in_memory(tmp_path)("out"), Job.restart, Job.resume, twice=True, replaces="ours"):
        assert job.seen() == OLD["id"].to_pylist()


def test_what_was_published_stays_until_the_new_output_is_there(places: Places) -> None:
    for job in deaths(places("out"), Job.restart, Job.restart, twice=False, replaces="nothing", published=True):
        assert job.seen() == [3]
        job.open().check_free(replace_foreign=False)
        job.start_anew()
        job.check_finished()


@pytest.mark.parametrize("name", NAMES)
def test_an_output_whose_commit_died_can_be_started_over(places: Places, name: str) -> None:
    for job in deaths(places(name), Job.commit, Job.restart, twice=False, replaces="ours"):
        job.open().check_free(replace_foreign=False)
        job.start_anew()
        job.check_finished()
