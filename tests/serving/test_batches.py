"""Files and batches of an endpoint, by OpenAI's own client; what runs them is a simulated engine."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmbatch.errors import DataError, JobError, JobStopped, ParameterError
from llmbatch.inference.progress import Advance, Silence
from llmbatch.inference.report import Report
from llmbatch.inference.worker import Worker
from llmbatch.jobs.job import run_by
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.serving.batches.files import FileStore
from llmbatch.serving.batches.records import Record, StateFolder, write_record
from llmbatch.serving.batches.store import BatchStore
from llmbatch.serving.refused import Refused
from llmbatch.serving.server import run_batch
from tests.support.batches import COMPLETIONS, line
from tests.support.serving import SIMULATED, Served, served

LINES = b"".join(json.dumps(line(f"line-{number}")).encode() + b"\n" for number in range(20))


def upload(echo: Served, content: bytes = LINES) -> str:
    return echo.client.files.create(file=("in.jsonl", content), purpose="batch").id


def begin(echo: Served, file: str, **others: Any) -> Any:
    asked: Any = {"endpoint": COMPLETIONS, "completion_window": "24h", **others}
    return echo.client.batches.create(input_file_id=file, **asked)


def ended(echo: Served, name: str) -> Any:
    """The batch when it has ended."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        batch = echo.client.batches.retrieve(name)
        if batch.status in ("completed", "failed", "cancelled"):
            return batch
    raise TimeoutError(name)


def lines_of(echo: Served, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in echo.client.files.content(name).text.splitlines()]


def test_a_file_is_kept_described_listed_sent_and_removed(echo: Served) -> None:
    name = upload(echo, b"{}\n")
    found = echo.client.files.retrieve(name)
    assert (found.bytes, found.filename, found.purpose, found.status) == (3, "in.jsonl", "batch", "processed")
    assert [file.id for file in echo.client.files.list()] == [name]
    assert echo.client.files.content(name).content == b"{}\n"
    assert echo.client.files.delete(name).deleted
    assert list(echo.client.files.list()) == []
    with pytest.raises(openai.NotFoundError, match="file_id must be that of a file, got"):
        echo.client.files.retrieve(name)


def test_lists_have_an_order(echo: Served) -> None:
    names = [upload(echo, b"{}\n") for _ in range(3)]
    assert [file.id for file in echo.client.files.list()] == names[::-1]
    assert [file.id for file in echo.client.files.list(order="asc", limit=2)] == names
    for asked, said in (
        ({"order": "up"}, "order must be asc or desc, got 'up'"),
        ({"limit": "10001"}, "limit must be from 1 to 10,000, got '10001'"),
    ):
        answer = httpx.get(f"{echo.url}/v1/files", params=asked)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_a_file_for_something_else_and_one_that_is_too_large_are_refused(worker: Worker, tmp_path: Path) -> None:
    with served(worker, tmp_path, max_upload=1000) as echo:
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch', got 'assistants'"):
            echo.client.files.create(file=("a", b"a"), purpose="assistants")
        answer = httpx.post(f"{echo.url}/v1/files", files={"file": b"a" * 2000}, data={"purpose": "batch"})
        assert answer.status_code == 413
        answer = httpx.post(f"{echo.url}/v1/files", files={"other": b"a"}, data={"purpose": "batch"})
        assert answer.json()["error"]["message"] == "file must be given as a file"
        assert list(echo.client.files.list()) == []


def test_a_file_that_should_expire_is_refused(echo: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        echo.client.files.create(
            file=("a", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (caught.value.param, list(echo.client.files.list())) == ("expires_after[anchor]", [])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == (
        "expires_after[anchor] must be left out, since a file has no such field here: known are file, purpose"
    )


def test_a_batch_is_answered(echo: Served) -> None:
    batch = begin(echo, upload(echo), metadata={"a": "b"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", COMPLETIONS, {"a": "b"})
    done = ended(echo, batch.id)
    counts = done.request_counts
    assert (done.errors, done.status) == (None, "completed")
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = lines_of(echo, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(20)]
    assert {one["response"]["status_code"] for one in found} == {200}
    assert done.error_file_id is None
    assert [one.id for one in echo.client.batches.list()] == [batch.id]


def test_lines_that_fail_are_in_the_file_of_errors(echo: Served) -> None:
    bad = json.dumps(line("bad", max_tokens=0)).encode() + b"\n"
    done = ended(echo, begin(echo, upload(echo, LINES + bad)).id)
    assert (done.request_counts.completed, done.request_counts.failed) == (20, 1)
    (found,) = lines_of(echo, done.error_file_id)
    assert (found["custom_id"], found["response"]["status_code"]) == ("bad", 400)


def test_a_file_that_is_no_batch_fails_and_says_which_lines_are_wrong(echo: Served) -> None:
    done = ended(echo, begin(echo, upload(echo, LINES + b'{"text": "a"}\n\n{\n' + LINES[: LINES.index(b"\n")])).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert [(one.code, one.line, one.param) for one in done.errors.data] == [
        ("missing_required_parameter", 21, "custom_id"),
        ("invalid_json_line", 23, None),
        ("duplicate_custom_id", 24, "custom_id"),
    ]


def test_half_of_a_character_is_the_error_of_its_line(echo: Served) -> None:
    bad = json.dumps(line("bad", prompt="\ud800")).encode() + b"\n"
    done = ended(echo, begin(echo, upload(echo, LINES + bad)).id)
    assert (done.status, done.request_counts.completed) == ("completed", 20)
    [found] = lines_of(echo, done.error_file_id)
    assert (found["custom_id"], found["response"]["body"]["error"]["param"]) == ("bad", "prompt")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be one of /v1/chat/completions, /v1/completions, got "
         "'/v1/embeddings'"),
        ({"extra_body": {"endpoint": []}}, "endpoint must be one of /v1/chat/completions, /v1/completions, got []"),
        ({"completion_window": "1h"}, "completion_window must be '24h', got '1h'"),
        ({"extra_body": {"metadata": 3}}, "metadata must be an object of texts, got 3"),
        ({"extra_body": {"metadata": {"a": 1}}}, "metadata must be an object of texts, got {'a': 1}"),
        ({"extra_body": {"model": "m"}}, "model must be left out, since a batch has no such field here: known are "
         "input_file_id, endpoint, completion_window, metadata"),
        ({"extra_body": {"": 1}}, "'' must be left out, since a batch has no such field here: known are "
         "input_file_id, endpoint, completion_window, metadata"),
    ],
)  # fmt: skip  # a table
def test_a_batch_is_refused_by_the_name_of_the_field(echo: Served, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        begin(echo, upload(echo), **asked)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == message


def test_names_that_are_none_are_not_found(echo: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="input_file_id must be that of a file, got 'file-1'"):
        begin(echo, "file-1")
    with pytest.raises(openai.NotFoundError, match="batch_id must be that of a batch, got 'batch_1'"):
        echo.client.batches.retrieve("batch_1")


class Jobs:
    """Jobs that wait until they are asked to end, and remember what they were given."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.inputs: list[bytes] = []

    def __call__(self, source: Path, output: Path, url: str, progress: Any, stopping: StopRequest) -> Report:
        self.inputs.append(source.read_bytes())
        progress.start(7)
        self.begun.release()
        while stopping.deadline is None:
            pass
        raise JobStopped("the job was asked to end")


def store(folder: Path, run: Callable[..., Report]) -> tuple[FileStore, BatchStore]:
    files = FileStore(folder / "files")
    return files, BatchStore(folder / "batches", files, run)


def added(files: FileStore, batches: BatchStore, tmp_path: Path, lines: bytes = LINES) -> str:
    (tmp_path / "in").write_bytes(lines)
    with (tmp_path / "in").open("rb") as content:
        file = files.add(content, "in", "batch")["id"]
    name: str = batches.add({"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"})["id"]
    files.remove(file)
    return name


def left_of(folder: Path, name: str) -> list[str]:
    """The names in the folder of a batch."""
    return sorted(path.name for path in (folder / "batches" / name).iterdir())


def test_a_batch_that_cannot_be_read_fails_without_a_word_of_the_servers_folders(tmp_path: Path) -> None:
    def run(source: Path, output: Path, url: str, progress: Any, stopping: StopRequest) -> Report:
        output.with_name("output.jsonl._llmbatch").mkdir()
        raise DataError(f"line 1 of {source} cannot be held by a table")

    files, batches = store(tmp_path, run)
    name = added(files, batches, tmp_path)
    batches.start()
    while batches.get(name)["status"] != "failed":
        pass
    batches.close(0.0)
    [fault] = batches.get(name)["errors"]["data"]
    assert (fault["code"], fault["message"]) == ("invalid_input", "line 1 of input.jsonl cannot be held by a table")
    assert left_of(tmp_path, name) == ["batch.json"]


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_what_a_kill_left_of_a_batch_that_had_ended_is_removed(tmp_path: Path, status: str) -> None:
    files, batches = store(tmp_path, Jobs())
    name = added(files, batches, tmp_path)
    write_record(tmp_path / "batches" / name / "batch.json", {**batches.get(name), "status": status})
    assert left_of(tmp_path, name) == ["batch.json", "input.jsonl"]
    _, again = store(tmp_path, Jobs())
    again.start()
    again.close(0.0)
    assert left_of(tmp_path, name) == ["batch.json"]
    assert again.get(name)["status"] == status


def test_what_a_kill_left_of_files_and_batches_that_nobody_knows_is_removed(tmp_path: Path) -> None:
    files, batches = store(tmp_path, Jobs())
    kept, lost = (files.add(BytesIO(LINES), "in", "batch")["id"] for _ in range(2))
    name = added(files, batches, tmp_path)
    (tmp_path / "files" / lost / "file.json").unlink()
    (tmp_path / "batches" / name / "batch.json").unlink()
    (tmp_path / "files" / "of_others").mkdir()
    again, _ = store(tmp_path, Jobs())
    assert [one["id"] for one in again.list()] == [kept]
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [kept, "of_others"]
    assert list((tmp_path / "batches").iterdir()) == []


def test_files_and_batches_of_a_second_keep_their_order_when_a_server_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    files, batches = store(tmp_path, Jobs())
    kept = [files.add(BytesIO(LINES), f"{number}", "batch")["id"] for number in range(8)]
    asked = [{"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"} for file in kept]
    begun = [batches.add(one)["id"] for one in asked]
    files, batches = store(tmp_path, Jobs())
    assert [one["id"] for one in files.list()] == kept[::-1]
    assert [one["id"] for one in batches.list()] == begun[::-1]


def test_lines_that_fail_are_counted_apart_while_a_batch_runs(worker: Worker, tmp_path: Path) -> None:
    told: list[Any] = []

    def run(source: Path, output: Path, url: str, progress: Any, stopping: StopRequest) -> Report:
        asked = {"model": worker.options.model, **SIMULATED}
        report = run_by(Worker.open, str(source), str(output), progress, stopping, asked)
        told.append(batches.get(name)["request_counts"])
        return report

    files, batches = store(tmp_path, run)
    name = added(files, batches, tmp_path, LINES + json.dumps(line("bad", max_tokens=0)).encode())
    batches.start()
    while batches.get(name)["status"] != "completed":
        pass
    batches.close(0.0)
    assert told == [{"total": 21, "completed": 20, "failed": 1}]


def test_a_batch_that_had_not_ended_goes_on_when_a_server_starts_again(tmp_path: Path) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, jobs)
    batches.start()
    name = added(files, batches, tmp_path)
    assert jobs.begun.acquire(timeout=60)
    assert batches.get(name)["request_counts"] == {"total": 7, "completed": 0, "failed": 0}
    batches.close(0.0)
    assert batches.get(name)["status"] == "in_progress"
    _, again = store(tmp_path, jobs)
    again.start()
    assert jobs.begun.acquire(timeout=60)
    assert jobs.inputs == [LINES, LINES]
    again.close(0.0)


def advanced(jobs: Jobs) -> Any:
    """Jobs that have answered three lines, one of them by an error, before they begin."""

    def run(source: Path, output: Path, url: str, progress: Any, stopping: StopRequest) -> Report:
        progress.advance(Advance(3, 10, errors=1))
        return jobs(source, output, url, progress, stopping)

    return run


def test_a_batch_that_goes_on_has_the_counts_that_it_had(tmp_path: Path) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, advanced(jobs))
    name = added(files, batches, tmp_path)
    batches.start()
    assert jobs.begun.acquire(timeout=60)
    batches.close(0.0)
    _, again = store(tmp_path, jobs)
    again.start()
    assert jobs.begun.acquire(timeout=60)
    assert again.get(name)["request_counts"] == {"total": 7, "completed": 2, "failed": 1}
    again.close(0.0)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_batch_that_was_begun_with_other_options_starts_over(
    worker: Worker, tmp_path: Path, is_finished: bool
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line(f"{tokens}", max_tokens=tokens)) for tokens in (None, 5, 0)))
    asked = {"model": worker.options.model, **SIMULATED, "max_tokens": 3}
    run = partial(run_by, Worker.open, str(source), str(output), Silence(), StopRequest())
    restarts: list[str] = []
    said = partial(restarts.append, "said")
    with nullcontext() if is_finished else pytest.raises(JobError):
        options = {**asked, "max_tokens": 2, "on_error": "column" if is_finished else "raise"}
        run_batch(run, options, said)
    assert not restarts
    report = run_batch(run, asked, said)
    bodies = [json.loads(text)["response"]["body"] for text in output.read_text().splitlines()]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [3, 5]
    assert (report.rows, report.errors, report.finished_before) == (3, 1, False)
    assert run_batch(run, asked, said).finished_before
    assert restarts == ["said"]


def test_a_batch_that_comes_while_a_server_ends_is_begun_by_the_next_one(tmp_path: Path) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, jobs)
    name = added(files, batches, tmp_path)
    batches.close(0.0)
    batches.start()
    assert batches.get(name)["status"] == "validating"
    assert jobs.inputs == []
    _, again = store(tmp_path, jobs)
    again.start()
    assert jobs.begun.acquire(timeout=60)
    again.close(0.0)


def test_a_batch_can_be_cancelled_before_and_while_it_runs(tmp_path: Path) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, jobs)
    first, second = added(files, batches, tmp_path), added(files, batches, tmp_path)
    batches.start()
    assert jobs.begun.acquire(timeout=60)
    assert batches.cancel(second)["status"] == "cancelled"  # whatever runs before it
    assert batches.cancel(first)["status"] == "cancelling"
    while batches.get(first)["status"] != "cancelled":
        pass
    third = added(files, batches, tmp_path)
    assert jobs.begun.acquire(timeout=60)
    batches.close(0.0)
    assert jobs.inputs == [LINES, LINES]
    assert batches.get(third)["status"] == "in_progress"
    assert batches.cancel(first)["status"] == "cancelled"
    assert left_of(tmp_path, first) == ["batch.json"]


def test_a_batch_that_is_cancelled_keeps_its_counts(tmp_path: Path) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, advanced(jobs))
    name = added(files, batches, tmp_path)
    batches.start()
    assert jobs.begun.acquire(timeout=60)
    batches.cancel(name)
    batches.close(0.0)
    _, again = store(tmp_path, jobs)
    assert again.get(name)["status"] == "cancelled"
    assert again.get(name)["request_counts"] == {"total": 7, "completed": 2, "failed": 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (r'"\ud800"', r"metadata must be valid UTF-8, got '\ud800' (surrogates not allowed)"),
        ("1e999", "metadata must be an object of texts, got {'a': inf}"),
    ],
)
def test_metadata_that_json_cannot_send_again_is_refused(echo: Served, value: str, message: str) -> None:
    asked = {"input_file_id": upload(echo), "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": 0}}
    content, kind = json.dumps(asked).replace('"a": 0', f'"a": {value}'), {"content-type": "application/json"}
    answer = httpx.post(f"{echo.url}/v1/batches", content=content, headers=kind)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert list(echo.client.batches.list()) == []


def test_the_name_of_a_file_may_be_any_bytes(echo: Served) -> None:
    content = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="+2AA-"\r\n\r\nx\r\n--b--\r\n'
    )
    kind = {"content-type": "multipart/form-data; boundary=b; charset=utf-7"}
    answer = httpx.post(f"{echo.url}/v1/files", content=content, headers=kind)
    assert (answer.status_code, answer.json()["filename"]) == (200, "\ufffd")
    assert [file.filename for file in echo.client.files.list()] == ["\ufffd"]


class Full:
    """A disk on which nothing can be written for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        monkeypatch.setattr("llmbatch.serving.batches.store.write_record", self._write)
        monkeypatch.setattr("llmbatch.serving.batches.files.write_record", self._write)

    def _write(self, path: Path, record: Record) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_record(path, record)


def test_a_file_that_finds_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Full(monkeypatch)
    files = FileStore(tmp_path)
    with pytest.raises(Refused, match=r"^the file cannot be kept \(no space left on device\): have room made in "):
        files.add(BytesIO(LINES), "in", "batch")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_finds_a_full_disk_fails_and_the_next_one_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    files, batches = store(tmp_path, jobs)
    first = added(files, batches, tmp_path)
    disk = Full(monkeypatch)
    batches.start()
    while batches.get(first)["status"] != "failed":
        pass
    assert batches.get(first)["errors"]["data"][0]["message"] == "[Errno 28] No space left on device"
    disk.is_full = False
    added(files, batches, tmp_path)
    assert jobs.begun.acquire(timeout=60)
    batches.close(0.0)
    _, again = store(tmp_path, jobs)
    assert again.get(first)["status"] == "validating"  # what the disk knows: it is run when a server starts again


def test_a_folder_of_state_is_made_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    StateFolder.open(Path("there/state")).close()
    assert (tmp_path / "there" / "state").is_dir()


def test_a_folder_is_one_endpoint_s_alone(tmp_path: Path) -> None:
    first = StateFolder.open(tmp_path / "state")
    with pytest.raises(ParameterError, match=r"^state_dir must be one endpoint's alone, got .*\(--state-dir\)$"):
        StateFolder.open(tmp_path / "state")
    first.close()
    StateFolder.open(tmp_path / "state").close()
