"""Whatever lies in a work folder: no other file is touched, and nothing is published that does not add up.

The sentence names the file, and the way out.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import DataError, LLMBatchError, ModelError, StorageError
from llmbatch.io.sealed_json import seal
from tests.support.dying import killed
from tests.support.jobs import OTHER, OVER, Job, begun, contents, no_power_cuts, rows


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    no_power_cuts(monkeypatch)


@pytest.fixture
def half(small: Job) -> Job:
    """One whose first window is whole and whose second one has a journal."""
    small.run_until(9, order="input", max_running=1)
    assert (small.work / "000-window-00000.json").exists()
    assert (small.work / "000-journal-00001").exists()
    return small


def edit(path: Path, **changes: Any) -> None:
    """Change a sealed file, and seal it again."""
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_bytes(seal(path.name, {**content, **changes}))


def said(job: Job, **options: Any) -> str:
    """What the refusal of a job says, which changes nothing on the disk but for its own lock and temporary files."""
    before = contents(job.folder)
    with pytest.raises(LLMBatchError) as caught:
        job.run(**options)
    assert contents(job.folder) == before
    return str(caught.value)


# No other file is touched


ENDING: dict[str, Any] = {"removed": [], "files": {}, "manifest": None, "replaced": None}
PART = {"rows": 1, "size": 1, "digest": "0"}


@pytest.mark.parametrize("name", ["out", "out.parquet"])
@pytest.mark.parametrize(
    "ending",
    [
        {"removed": ["../victim.parquet"]},
        {"removed": ["victim.txt"]},
        {"removed": ["/victim.parquet"]},
        {"removed": ["..\\victim.parquet"]},
        {"removed": [".."]},
        {"removed": [7]},
        {"removed": None},
        {"replaced": ["../victim.parquet"]},
        {"files": {"../victim.parquet": []}},
        {"files": {"part-00000.parquet": [{"name": "../../victim", **PART}]}},
        {"files": {"part-00000.parquet": [{"name": "x"}]}},
        {"files": []},
        {"manifest": {"parts": [{"name": "../victim.parquet", "rows": 1}]}},
        {"manifest": {"parts": []}, "files": {"part-00000.parquet": []}},
        {"manifest": 7},
    ],
    ids=json.dumps,
)
def test_an_ending_speaks_of_the_output_alone(small: Job, name: str, ending: dict[str, Any]) -> None:
    job = small.to(name)
    for victim in ("victim.parquet", "victim.txt", "victim"):
        (job.folder / victim).write_text("precious")
    job.work.mkdir(parents=True)
    (job.work / "ending.json").write_bytes(seal("ending.json", {**ENDING, **ending}))
    assert said(job) == (
        f"{job.work / 'ending.json'} is damaged, or another version's of llmbatch, which no crash of a job does: {OVER}"
    )


def test_a_part_of_one_file_may_not_remove_its_neighbours(small: Job) -> None:
    job = small.to("out.parquet")
    (job.folder / "other.parquet").write_text("precious")
    job.work.mkdir()
    (job.work / "ending.json").write_bytes(seal("ending.json", {**ENDING, "removed": ["other.parquet"]}))
    assert "ending.json is damaged" in said(job)


@pytest.mark.parametrize(
    "names",
    [{"replaced": ["../victim.parquet"], "published": {}}, {"replaced": [], "published": {"x": "../victim"}}, {}],
)
def test_names_are_plain(half: Job, names: dict[str, Any]) -> None:
    (half.folder / "victim.parquet").write_text("precious")
    (half.work / "names.json").write_bytes(seal("names.json", names))
    assert said(half).startswith(f"{half.work / 'names.json'} is damaged")


def test_parts_of_a_window_have_the_names_of_its_parts(half: Job) -> None:
    path = half.work / "000-window-00000.json"
    parts = json.loads(path.read_bytes())["parts"]
    edit(path, parts=[{**part, "name": "../../in"} for part in parts])
    assert said(half) == (
        f"{path} is damaged, or another version's of llmbatch, which no crash of a job does: remove {path}, and its "
        f"rows are answered again; or {OVER}"
    )


# What was changed is seen


@pytest.mark.parametrize("name", ["job.json", "names.json", "000-window-00000.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"checksum": "0"}'])
def test_a_file_that_is_no_work_of_ours_is_refused(half: Job, name: str, content: bytes) -> None:
    path = half.work / name
    path.write_bytes(content)
    assert said(half).startswith(f"{path} is damaged, or another version's of llmbatch, which no crash of a job does: ")


@pytest.mark.parametrize("name", ["job.json", "names.json", "000-window-00000.json"])
def test_a_file_that_was_edited_is_refused(half: Job, name: str) -> None:
    path = half.work / name
    text = re.sub(r'("window_rows": |"rows": |"replaced": \[)', r"\g<1>1", path.read_text(), count=1)
    assert text != path.read_text()
    path.write_text(text)
    assert said(half).startswith(f"{path} is damaged")


def test_a_file_in_the_place_of_another_is_refused(half: Job) -> None:
    (half.work / "000-window-00001.json").write_bytes((half.work / "000-window-00000.json").read_bytes())
    assert said(half).startswith(f"{half.work / '000-window-00001.json'} is damaged")


def test_a_window_that_is_removed_is_answered_again(half: Job) -> None:
    (half.work / "000-window-00000.json").unlink()
    half.run()
    assert half.answers().equals(half.undisturbed())


def cut(job: Job) -> None:
    path = job.work / "000-part-00000-00.parquet.staged"
    path.write_bytes(path.read_bytes()[:100])


def remove(job: Job) -> None:
    (job.work / "000-part-00000-00.parquet.staged").unlink()


@pytest.mark.parametrize(("harm", "what"), [(cut, "is not what was written to it, which no crash does:"), (remove, "")])
def test_a_staged_part_that_is_not_as_it_was_is_refused_before_more_is_answered(
    half: Job, harm: Callable[[Job], None], what: str
) -> None:
    harm(half)
    with begun() as answered:
        told = said(half)
    assert not answered
    assert told.startswith(f"{half.work / '000-part-00000-00.parquet.staged'} {what or 'is gone: put it back; or'}")
    assert f"remove {half.work / '000-window-00000.json'}, and its rows are answered again" in told
    assert main([*half.command(), "--restart"]) == 0


def test_a_part_of_which_a_bit_changed_is_not_published(half: Job) -> None:
    part = half.work / "000-part-00000-00.parquet.staged"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(StorageError, match=re.escape(f"{part} is not what was written to it, which no crash does: ")):
        half.run()
    assert not list(half.out.glob("*.parquet"))


def test_a_part_that_changes_between_commit_and_its_name_is_not_published(small: Job) -> None:
    def run() -> None:
        small.run()

    step = 0
    while not (small.work / "ending.json").exists():
        step += 1
        assert killed(step, run, ["move", "write"])
    (part, *_) = sorted(small.work.glob("*.staged"))
    part.write_bytes(bytes(part.stat().st_size))
    assert said(small) == f"{part} is not what was written to it, which no crash does: {OVER}"
    small.run(restart=True)
    assert small.answers().equals(small.undisturbed())


@pytest.mark.parametrize("of", ["keys", "parquet.staged"])
def test_parts_in_the_order_in_which_rows_finish_are_sealed_too(small: Job, of: str) -> None:
    job = small.having(preserve_order=False).to("out.parquet")
    job.run_until(10)
    path = job.work / f"spool-00000.{of}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises((DataError, StorageError), match=re.escape(f"{path} is ")):
        job.run()
    assert not job.out.exists()


# Other versions


def test_a_job_of_the_format_before_is_refused(half: Job) -> None:
    (half.work / "job.json").write_text('{"format": 2, "window_rows": 0}')
    assert said(half) == (
        f"the job at {half.out} was begun by another version of llmbatch, in format 2 and not 3: finish it with that "
        f"one, {OTHER}"
    )


# Starting over


def test_a_restart_without_weights_deletes_nothing(small: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    small.run()
    before = contents(small.out)
    folder = tmp_path_factory.mktemp("weightless")
    shutil.copytree(small.model, folder, dirs_exist_ok=True)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelError):
        replace(small, model=str(folder)).run(restart=True, engine="torch", output_tokens=None, device="cpu")
    assert contents(small.out) == before


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.jsonl"])
@pytest.mark.parametrize("again", [{}, {"restart": True}])
def test_a_restart_that_is_asked_to_end_is_gone_on_with_and_the_old_output_stays_until_then(
    small: Job, name: str, again: dict[str, Any]
) -> None:
    job = small.to(name)
    job.run(max_tokens=7)
    old = {path: path.read_bytes() for path in (job.out.glob("*.parquet") if job.out.is_dir() else [job.out])}
    job.run_until(10, restart=True)
    assert old == {path: path.read_bytes() for path in old}
    with begun() as answered:
        report = job.run(**again)
    assert (report.rows_resumed, len(answered)) == (
        (0, 12) if again else (report.rows_resumed, 12 - report.rows_resumed)
    )
    assert bool(again) == (report.rows_resumed == 0)
    if name != "out.jsonl":
        assert job.answers().equals(small.undisturbed())


def test_a_restart_takes_no_answer_of_the_output_that_it_replaces(small: Job) -> None:
    job = small.having(id_column="id")
    job.run()
    job.run_until(5, restart=True)
    job.write(rows(14))
    with begun() as answered:
        report = job.run()
    assert report.rows_resumed + len(answered) == 14
    assert len(answered) > 2


def test_a_restart_that_died_before_it_said_so_leaves_nothing(small: Job) -> None:
    small.run()
    before = contents(small.folder)
    small.work.mkdir()
    (small.work / "names.json").write_bytes(seal("names.json", {"replaced": ["part-00000.parquet"], "published": {}}))
    assert small.run().finished_before
    assert contents(small.folder) == before


def test_overwrite_goes_on_without_it(small: Job) -> None:
    small.out.mkdir()
    pq.write_table(rows(3), small.out / "theirs.parquet")
    small.run_until(10, overwrite=True)
    assert (small.out / "theirs.parquet").exists()
    small.run()
    assert small.answers().equals(small.undisturbed())
