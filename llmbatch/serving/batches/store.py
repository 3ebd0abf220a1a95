"""Batches: files of requests that are answered in what requests of people leave, and survive a kill.

A batch is a durable job (`llmbatch.jobs.job`) from a file to a file, one after another in a thread of its own. Its
record says how far it has come; what it has answered is in the journal of the job. So a server that is started again
goes on with each batch that has not ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from llmbatch.arguments import shown, text
from llmbatch.errors import InputError, JobStopped, LLMBatchError, ParameterError
from llmbatch.inference.progress import Advance
from llmbatch.inference.report import Report
from llmbatch.openai.answers import brief
from llmbatch.openai.fields import FIELDS
from llmbatch.openai.validation import Fault, find_faults
from llmbatch.runtime.cancellation import StopRequest
from llmbatch.serving.batches.files import FileStore
from llmbatch.serving.batches.records import Record, new_id, read_records, write_record
from llmbatch.serving.refused import Refused, not_kept, unknown
from llmbatch.storage.local import make_folder

_RECORD: Final = "batch.json"
_INPUT, _OUTPUT, _ERRORS = "input.jsonl", "output.jsonl", "output.errors.jsonl"
_WINDOW: Final = "24h"  # the only one that OpenAI knows; it is not a limit here
_TIMES: Final = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_ENDED: Final = ("completed", "failed", "cancelled", "expired")
_FIELDS: Final = ("input_file_id", "endpoint", "completion_window", "metadata")
_KNOWN: Final = ", ".join(_FIELDS)

# Runs the lines of a file at a url to an output.
RunJob = Callable[[Path, Path, str, "_Counts", StopRequest], Report]


class _Counts:
    """How far a batch has come: the `Progress` of its job."""

    def __init__(self, total: int = 0, completed: int = 0, failed: int = 0) -> None:
        self.total = total
        self.done = Advance(completed + failed, 0, failed)

    def start(self, rows: int) -> None:
        """Take note of how many lines there are."""
        self.total = rows

    def advance(self, done: Advance) -> None:
        """Take note of how many are answered."""
        self.done = done

    def say(self, sentence: str) -> None:
        """Pass over what there is to tell: nobody looks."""

    def told(self) -> dict[str, int]:
        """Return them as a batch's `request_counts`."""
        done = self.done
        return {"total": self.total, "completed": done.rows - done.errors, "failed": done.errors}


class BatchStore:
    """The batches of an endpoint, and the thread that runs them."""

    def __init__(self, folder: Path, files: FileStore, run: RunJob) -> None:
        make_folder(str(folder))
        self._folder, self._files, self._run = folder, files, run
        self._lock = threading.Lock()  # of the records
        self._records = read_records(folder, _RECORD)
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._current: tuple[str, StopRequest] | None = None
        self._counts = _Counts()
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)

    def start(self) -> None:
        """Go on with batches that have not ended, and begin those that come."""
        for name, record in self._records.items():
            if record["status"] == "cancelling":
                self._cancel(name)
            elif record["status"] in _ENDED:  # a kill may have come before it was cleared
                self._clear(self._folder / name)
            else:
                self._queue.put(name)
        self._thread.start()

    def add(self, body: Mapping[str, Any]) -> Record:
        """Begin a batch. Raises Refused."""
        for name in body:
            if name not in _FIELDS:
                raise _invalid(name, f"must be left out, since a batch has no such field here: known are {_KNOWN}")
        endpoint, window, metadata = (body.get(name) for name in ("endpoint", "completion_window", "metadata"))
        if not isinstance(body.get("input_file_id"), str):
            raise _invalid("input_file_id", f"must be the id of a file, got {shown(body.get('input_file_id'))}")
        if not isinstance(endpoint, str) or endpoint not in FIELDS:
            raise _invalid("endpoint", f"must be one of {', '.join(FIELDS)}, got {shown(endpoint)}")
        if window != _WINDOW:
            raise _invalid("completion_window", f"must be {_WINDOW!r}, got {shown(window)}")
        if metadata is not None:
            _check_metadata(metadata)
        source = self._files.content(body["input_file_id"], "input_file_id")
        name = new_id("batch_")
        try:
            make_folder(str(self._folder / name))
            os.link(source, self._folder / name / _INPUT)
        except OSError as error:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            raise not_kept("batch", error) from None
        record: Record = {
            "id": name,
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": body["input_file_id"],
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            **{f"{moment}_at": None for moment in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        with self._lock:
            self._write(name, record)
        self._queue.put(name)
        return record

    def get(self, name: str) -> Record:
        """Return the record of a batch, as it is now. Raises Refused where there is none."""
        with self._lock:
            if name not in self._records:
                raise unknown("a batch", name, "batch_id")
            return self._now(name)

    def list(self) -> list[Record]:
        """Return the records of all batches, newest first."""
        return [self.get(name) for name in [*self._records][::-1]]

    def cancel(self, name: str) -> Record:
        """Ask a batch to end; one that has ended stays as it is. Raises Refused where there is none."""
        self.get(name)
        with self._lock:
            if self._records[name]["status"] not in _ENDED:
                moved = _moved(self._now(name), "cancelling")
                if self._current is not None and self._current[0] == name:
                    self._write(name, moved)
                    self._current[1].ask()
                else:  # it waits: nothing of it can end any more
                    self._write(name, _moved(moved, "cancelled"))
                    self._clear(self._folder / name)
        return self.get(name)

    def close(self, grace: float) -> None:
        """Let rows of the batch that runs have `grace` seconds to end, and begin none. It goes on another time."""
        self._queue.put(None)
        with self._lock:
            self._ending = True
            if self._current is not None:
                self._current[1].grace = grace
                self._current[1].ask()
        if self._thread.is_alive():
            self._thread.join()

    def _now(self, name: str) -> Record:
        """Return the record of a batch with its counts as they are; the lock is held."""
        record = self._records[name]
        is_run = self._current is not None and self._current[0] == name
        return {**record, "request_counts": self._counts.told()} if is_run else record

    def _work(self) -> None:
        while (name := self._queue.get()) is not None:
            try:
                self._answer(name)
            except Exception as error:  # the thread goes on with the next one, whatever it was
                message = " ".join(str(error).split()) or type(error).__name__
                self._fail(name, [self._fault(name, "server_error", message)])
            finally:
                with self._lock:
                    self._current = None

    def _answer(self, name: str) -> None:
        stopping = StopRequest()
        with self._lock:
            record = self._records[name]
            if self._ending or record["status"] in _ENDED:
                return
            self._current, self._counts = (name, stopping), _Counts(**record["request_counts"])
        place = self._folder / name
        if record["status"] == "validating":
            with (place / _INPUT).open("rb") as lines:
                faults = find_faults(lines)
            if faults:
                self._fail(name, faults)
                return
            with self._lock:
                if self._records[name]["status"] == "validating":
                    self._write(name, _moved(record, "in_progress"))
        try:
            report = self._run(place / _INPUT, place / _OUTPUT, record["endpoint"], self._counts, stopping)
        except JobStopped:
            if self._records[name]["status"] == "cancelling":
                self._cancel(name)
                return
            with self._lock, contextlib.suppress(OSError):  # what is done is known when the server begins again
                self._write(name, self._now(name))
            return
        except InputError as error:
            self._fail(name, [self._fault(name, "invalid_input", str(error))])
            return
        except LLMBatchError as error:
            self._fail(name, [self._fault(name, "job_failed", str(error))])
            return
        self._complete(name, report)

    def _complete(self, name: str, report: Report) -> None:
        place = self._folder / name
        named = {}
        for key, file in (("output_file_id", _OUTPUT), ("error_file_id", _ERRORS)):
            if (place / file).is_file() and ((place / file).stat().st_size or key == "output_file_id"):
                kept = self._files.adopt(place / file, f"file-{key.partition('_')[0]}-{name}", f"{name}_{file}")
                named[key] = kept["id"]
        counts = {"total": report.rows, "completed": report.rows - report.errors, "failed": report.errors}
        with self._lock:
            record = _moved(_moved(self._records[name], "finalizing"), "completed")
            self._write(name, {**record, **named, "request_counts": counts})
            self._current = None
        self._clear(place)

    def _cancel(self, name: str) -> None:
        with self._lock:
            self._write(name, _moved(self._now(name), "cancelled"))
            self._current = None
        self._clear(self._folder / name)

    def _fault(self, name: str, code: str, message: str) -> Fault:
        """Make an entry of a batch's `errors` that tells of no folder of the server."""
        shown = brief(message.replace(f"{self._folder / name}{os.sep}", ""))
        return {"code": code, "line": None, "message": shown, "param": None}

    def _fail(self, name: str, faults: Sequence[Fault]) -> None:
        errors = {"object": "list", "data": faults}
        with self._lock:
            self._records[name] = {**_moved(self._now(name), "failed"), "errors": errors}
            try:
                self._write(name, self._records[name])
            except OSError:  # of a full disk, on which it goes on when the server starts again
                return
        self._clear(self._folder / name)

    def _clear(self, place: Path) -> None:
        """Remove all of an ended batch but its record."""
        with contextlib.suppress(OSError):
            for path in [path for path in place.iterdir() if path.name != _RECORD]:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    def _write(self, name: str, record: Record) -> None:
        write_record(self._folder / name / _RECORD, record)
        self._records[name] = record


def _moved(record: Record, status: str) -> Record:
    """Return a record with another status, and when it came to that."""
    moment = f"{status}_at"
    return {**record, "status": status, moment: record.get(moment) or int(time.time())}


def _check_metadata(value: object) -> None:
    """Refuse what is not an object of texts, as OpenAI's is: it is told again with the batch."""
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise _invalid("metadata", f"must be an object of texts, got {shown(value)}")
    try:
        for one in (*value, *value.values()):
            text("metadata", one)
    except ParameterError as error:
        raise _invalid("metadata", str(error).removeprefix("metadata ")) from None


def _invalid(param: str, rule: str) -> Refused:
    return Refused(400, f"{param or repr(param)} {rule}", param=param, code="invalid_value")
