"""The heartbeat of a lock: signs of life while the job runs, and no job without them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import llmbatch.lock
from llmbatch.errors import JobError, StorageError
from llmbatch.lock import Lock, Owner
from llmbatch.storage import Place
from tests.owners import elsewhere, put


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place.at(str(tmp_path))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.lock, "HEARTBEAT", 0.001)


def heartbeat(place: Place) -> float:
    return Owner.parse(place.read("lock-000001") or b"", "").heartbeat


def end_of_heartbeats() -> None:
    for thread in threading.enumerate():
        if thread.name == "llmbatch-lock":
            thread.join()


def test_the_heart_beats(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = threading.Semaphore(0)
    write = Place.write

    def observed(place: Place, name: str, data: bytes) -> None:
        write(place, name, data)
        beats.release()

    monkeypatch.setattr(Place, "write", observed)
    lock = Lock.acquire(local, what="OUT")
    first = heartbeat(local)
    assert beats.acquire(timeout=30)
    assert beats.acquire(timeout=30)
    assert heartbeat(local) > first
    lock.check()
    lock.release()
    assert local.names() == []


def test_a_heartbeat_that_storage_refuses_is_warned_of_and_the_next_one_tried(
    local: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats = threading.Semaphore(0)

    def refuse(place: Place, name: str, data: bytes) -> None:
        beats.release()
        raise StorageError("no room")

    monkeypatch.setattr(Place, "write", refuse)
    lock = Lock.acquire(local, what="OUT")
    for _ in range(3):
        assert beats.acquire(timeout=30)
    lock.check()
    lock.release()
    assert set(caplog.messages) == {"the heartbeat of the lock of OUT failed: no room"}


def test_a_heart_that_fails_otherwise_stops_the_job(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(place: Place, name: str, data: bytes) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Place, "write", fail)
    lock = Lock.acquire(local, what="OUT")
    end_of_heartbeats()
    with pytest.raises(JobError, match="a bug"):
        lock.check()
    lock.release()


def test_a_heart_stops_when_the_lock_was_taken_over(local: Place) -> None:
    lock = Lock.acquire(local, what="OUT")
    put(local, 2, elsewhere(silence=0.0))
    end_of_heartbeats()
    with pytest.raises(JobError, match="OUT was taken over by process 7 on far"):
        lock.check()
    lock.release()
    assert local.names() == ["lock-000002"]
