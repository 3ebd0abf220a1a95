"""The heartbeat of a lock: signs of life while the job runs, and no job without them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmbatch.storage.lock
from llmbatch.errors import JobError, StorageError
from llmbatch.storage.local import HeldFile
from llmbatch.storage.location import Location
from llmbatch.storage.lock import Lock, Owner
from tests.support.owners import elsewhere, put


@pytest.fixture
def local(tmp_path: Path) -> Location:
    return Location.at(str(tmp_path))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.storage.lock, "HEARTBEAT", 0.001)


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, local: Location) -> Location:
    return local if request.param == "disk" else Location.at(f"memory://{uuid.uuid4().hex}")


def beats(place: Location) -> int:
    return Owner.parse(place.read(*place.names()) or b"", "").beats


def end_of_heartbeats() -> None:
    for thread in threading.enumerate():
        if thread.name == "llmbatch-lock":
            thread.join()


def observe(patch: pytest.MonkeyPatch, seen: Callable[[], None]) -> None:
    """Have something done instead of each sign of life; the owner's file is written as it is."""

    def write(*_: object) -> None:
        seen()

    patch.setattr("llmbatch.storage.lock.HeldFile", Silent(write))


class Silent:
    """A file that is held, but for what is written to it later."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.write = write

    def make(self, *args: Any) -> HeldFile | None:
        held = HeldFile.make(*args)
        assert held is not None
        held.write = self.write  # type: ignore[method-assign]
        return held


def test_the_heart_beats(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    deadline = time.monotonic() + 30
    while beats(place) < 2:
        assert time.monotonic() < deadline
    lock.check()
    lock.release()
    assert place.names() == []


def test_a_heartbeat_that_storage_refuses_is_warned_of_and_the_next_one_tried(
    local: Location, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Semaphore(0)

    def refuse() -> None:
        tried.release()
        raise StorageError("no room")

    observe(monkeypatch, refuse)
    lock = Lock.acquire(local, what="OUT")
    for _ in range(3):
        assert tried.acquire(timeout=30)
    lock.check()
    lock.release()
    assert set(caplog.messages) == {"the heartbeat of the lock of OUT failed: no room"}


def test_a_heart_that_fails_otherwise_stops_the_job(local: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    observe(monkeypatch, fail)
    lock = Lock.acquire(local, what="OUT")
    end_of_heartbeats()
    with pytest.raises(JobError, match="a bug"):
        lock.check()
    lock.release()


def test_a_heart_stops_when_the_lock_was_taken_over(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    name = put(place, 2, elsewhere())
    end_of_heartbeats()
    with pytest.raises(JobError, match="OUT was taken over by process 7 on far"):
        lock.check()
    lock.release()
    assert place.names() == [name]
