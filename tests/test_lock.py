"""Locks: one owner at a time, also when owners are killed, sleep, or lie on other machines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import llmbatch.lock
from llmbatch.errors import DataError, JobError
from llmbatch.lock import Lock, Owner
from llmbatch.storage import Place
from tests.owners import elsewhere, put
from tests.s3 import S3Server, s3_fixture  # noqa: F401

# Takes the lock of a folder, says so, and waits until it is killed or told to go.
HOLDER = """
import sys
from llmbatch.errors import DataError
from llmbatch.lock import Lock
from llmbatch.storage import Place
sys.stdin.readline()
try:
    lock = Lock.acquire(Place.at(sys.argv[1]), what="OUT")
except DataError as error:
    print(error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.bucket("lock")


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place.at(str(tmp_path))


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, local: Place) -> Iterator[Place]:
    """An empty folder, on a local disk and on S3."""
    if request.param == "local":
        yield local
        return
    server = request.getfixturevalue("s3")
    place = Place.at(f"{request.getfixturevalue('bucket')}/out", server.storage_options)
    yield place
    place.clear()


@contextlib.contextmanager
def holder(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A process that tries for the lock at its first line of input and gives it back at the second."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, place.root], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_lock_is_one_file_while_it_is_held(place: Place) -> None:
    lock = Lock.acquire(place, what="OUT")
    assert place.names() == ["lock-000001"]
    lock.check()
    lock.release()
    lock.release()
    assert place.names() == []


def test_a_lock_says_who_holds_it(local: Place) -> None:
    lock = Lock.acquire(local, what="OUT")
    owner = Owner.parse(local.read("lock-000001") or b"", "")
    assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
    assert not owner.is_dead
    lock.release()


def test_a_lock_that_is_held_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmbatch.lock, "time", SimpleNamespace(time=lambda: 1000.0))
    lock = Lock.acquire(place, what="OUT")
    with pytest.raises(DataError) as caught:
        Lock.acquire(place, what="OUT")
    assert str(caught.value) == (
        f"OUT is being written by process {os.getpid()} on {socket.gethostname()}, last heard of 0 s ago; "
        "end that process or wait until it ends, or name another output"
    )
    lock.release()
    Lock.acquire(place, what="OUT").release()


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_a_process_killed_on_this_machine_loses_its_lock_at_once(local: Place, reaped: bool) -> None:
    with holder(local) as process:
        go(process)
        assert answer(process) == "held"
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        lock = Lock.acquire(local, what="OUT")
        assert local.names() == ["lock-000001", "lock-000002"]
        lock.check()
        lock.release()
    assert local.names() == []


def test_a_process_stopped_on_this_machine_keeps_its_lock(local: Place) -> None:
    put(local, 1, replace(Owner.here(), token="theirs", heartbeat=time.time() - 10_000))
    with pytest.raises(DataError, match="last heard of 10000 s ago; end that process"):
        Lock.acquire(local, what="OUT")


def test_a_process_that_got_the_number_of_a_dead_one_is_not_its_owner(local: Place) -> None:
    put(local, 1, replace(Owner.here(), started=1))
    Lock.acquire(local, what="OUT").release()


@pytest.mark.parametrize("before", [0, 1], ids=["a free lock", "a dead owner's lock"])
def test_of_processes_that_race_one_wins(local: Place, before: int) -> None:
    for number in range(before):
        put(local, number + 1, replace(Owner.here(), started=1))
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(holder(local)) for _ in range(4)]
        for process in processes:
            go(process)
        answers = [answer(process) for process in processes]
        winner = processes[answers.index("held")]
        assert sorted(text.partition(",")[0] for text in answers) == sorted(
            ["held"] + 3 * [f"OUT is being written by process {winner.pid} on {socket.gethostname()}"]
        )
        go(winner)
        winner.wait()
    assert local.names() == []


def test_of_threads_that_race_one_wins(local: Place) -> None:
    def contend(_: int) -> Lock | None:
        try:
            return Lock.acquire(local, what="OUT")
        except DataError:
            return None

    for _ in range(10):
        put(local, 1, replace(Owner.here(), started=1))
        with ThreadPoolExecutor(8) as pool:
            (lock,) = (lock for lock in pool.map(contend, range(8)) if lock is not None)
        lock.release()


def test_an_owner_elsewhere_is_believed_for_a_minute(place: Place) -> None:
    put(place, 1, elsewhere(silence=20.0))
    with pytest.raises(DataError) as caught:
        Lock.acquire(place, what="OUT")
    assert str(caught.value) == (
        "OUT is being written by process 7 on far, last heard of 20 s ago; "
        "wait until it ends, or, if it was killed, 40 s; or name another output"
    )
    assert place.names() == ["lock-000001"]


def test_an_owner_elsewhere_is_taken_for_dead_after_a_minute(place: Place) -> None:
    put(place, 1, elsewhere(silence=61.0))
    lock = Lock.acquire(place, what="OUT")
    assert place.names() == ["lock-000001", "lock-000002"]
    lock.release()
    assert place.names() == []


def test_an_owner_whose_lock_was_taken_over_is_told_who_has_it(place: Place) -> None:
    lock = Lock.acquire(place, what="OUT")
    put(place, 2, elsewhere(silence=0.0))
    with pytest.raises(JobError) as caught:
        lock.check()
    assert str(caught.value) == (
        "OUT was taken over by process 7 on far: "
        "this job gave no sign of life for too long, and the other one goes on from what it finished"
    )
    lock.release()
    assert place.names() == ["lock-000002"]


def test_an_owner_whose_lock_is_gone_is_told_so_and_leaves_the_next_one_alone(place: Place) -> None:
    lock = Lock.acquire(place, what="OUT")
    put(place, 1, elsewhere(silence=0.0))
    with pytest.raises(JobError) as caught:
        lock.check()
    assert str(caught.value) == (
        "the lock of OUT was removed while this job was writing; "
        "let one job at a time write an output, and run the command again"
    )
    lock.release()
    assert place.names() == ["lock-000001"]


def test_a_contender_that_finds_another_by_another_number_steps_back(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, 5, elsewhere(silence=61.0))
    create = Place.create

    def create_late(place: Place, name: str, data: bytes) -> bool:
        local.remove("lock-000005")
        put(local, 1, elsewhere(silence=0.0))
        return create(place, name, data)

    monkeypatch.setattr(Place, "create", create_late)
    with pytest.raises(DataError, match="OUT is being written by process 7 on far"):
        Lock.acquire(local, what="OUT")
    assert local.names() == ["lock-000001"]


def test_a_lock_released_while_it_is_looked_at_is_free(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    put(local, 1, elsewhere(silence=0.0))
    read = Place.read

    def read_late(place: Place, name: str) -> bytes | None:
        monkeypatch.undo()
        local.remove(name)
        return read(place, name)

    monkeypatch.setattr(Place, "read", read_late)
    Lock.acquire(local, what="OUT").release()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"host": "far"}'])
def test_a_file_that_is_no_lock_is_refused(local: Place, data: bytes) -> None:
    local.write("lock-000001", data)
    with pytest.raises(DataError) as caught:
        Lock.acquire(local, what="OUT")
    assert str(caught.value) == (
        f"{local.url}/lock-000001 is not a lock of this version of llmbatch; remove it if no job is running"
    )
