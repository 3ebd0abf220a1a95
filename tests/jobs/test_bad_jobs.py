"""Commands that cannot begin, or cannot go on: one sentence, exit status 2, and nothing on the disk has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from llmbatch.cli.main import main
from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.writing.manifest import decode
from tests.support.jobs import Job, check_refused, contents, rows
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder

# Other versions


@pytest.mark.parametrize("version", [2, 4])
def test_an_output_of_another_version_is_refused(job: Job, version: int, capfd: pytest.CaptureFixture[str]) -> None:
    job.run()
    manifest = decode(job.manifest.read_bytes(), "")
    job.manifest.write_text(json.dumps({**manifest, "format": version}))
    said = (
        f"the output {job.out} was written by another version of llmbatch, in format {version} and not 3: "
        "choose another name, or replace it with overwrite=True (--overwrite)"
    )
    check_refused(job, said, capfd)


@pytest.mark.parametrize("version", [2, 4])
def test_a_job_of_another_version_is_refused(job: Job, version: int, capfd: pytest.CaptureFixture[str]) -> None:
    job.run_until(25)
    file = job.work / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "format": version}))
    said = (
        f"the job at {job.out} was begun by another version of llmbatch, in format {version} and not 3: "
        "finish it with that one, choose another output, or start over with restart=True (--restart)"
    )
    check_refused(job, said, capfd)
    assert job.run(restart=True).rows_resumed == 0


# What cannot begin


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (
            ["a", "b", "c", "b"],
            "an id_column must have another value in every row, but 'key' is 'b' in rows 1 and 3: drop one of them, "
            "or name another column",
        ),
        (["a", "b", None, "c"], "an id_column must have a value in every row, but 'key' is null in row 2"),
        (
            [0, 1, 2, 1],
            "an id_column must have another value in every row, but 'key' is 1 in rows 1 and 3: drop one of them, "
            "or name another column",
        ),
        (
            pa.array([0, 2**62, 1, 2**62], pa.timestamp("us")),  # beyond the year 9999
            "an id_column must have another value in every row, but 'key' is alike in rows 1 and 3: drop one of them, "
            "or name another column",
        ),
    ],
)
def test_ids_must_be_there_and_differ(job: Job, ids: list[Any], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    job.write(rows(4).append_column("key", pa.array(ids)))
    check_refused(job.having(id_column="key"), said, capfd)


def test_an_id_column_must_be_a_column(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    said = "the id_column column 'key' is not in the input, whose columns are 'id', 'text', 'n'"
    check_refused(job.having(id_column="key"), said, capfd)


def test_the_output_must_lie_apart_from_the_input(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    said = f"the output must not be an input, got {job.source}: choose another name"
    check_refused(job.to("in.parquet"), said, capfd)
    command = [str(job.folder) if word == str(job.source) else word for word in job.command()]
    before = contents(job.folder)
    assert main(command) == 2
    said = f"the output must lie apart from the inputs, but {job.out} is inside {job.folder}: choose another place"
    assert capfd.readouterr().err == f"llmbatch: {said}\n"
    assert contents(job.folder) == before


def test_a_window_must_fit_in_memory(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmbatch.inference.window_size.available_memory", lambda: 10_000)
    each = Dataset.resolve([str(job.source)]).nbytes / 60 * 16
    said = (
        f"window_rows must fit in memory, 4 windows at a time, but 20 rows of this input take about {int(20 * each):,} "
        f"bytes and 10,000 are free: at most {int(10_000 / each)} (--window-rows)"
    )
    check_refused(job, said, capfd)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            None,
            "the tokenizer of {} has no chat template: give the prompts as prompt or template, without chat and system",
        ),
        (
            CHAT_TEMPLATE,
            "tools must be left out, since the chat template of {} tells the model of none: take a model whose "
            "template does",
        ),
    ],
)
def test_chats_that_no_template_renders_leave_nothing_behind(
    job: Job, template: str | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model_folder(job.folder / "model", "llama", chat_template=template)
    asked = job.having(system="Be brief.", tools='[{"type": "function", "function": {"name": "f"}}]')
    check_refused(replace(asked, model=model), said.format(model), capfd)
