"""Locks: one owner at a time, also when owners are killed, sleep, or lie on other machines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import llmbatch.storage.lock
from llmbatch.errors import DataError, JobError, StorageError
from llmbatch.storage.location import Location
from llmbatch.storage.lock import Lock, Owner
from tests.support.owners import TOKEN, dead, elsewhere, put
from tests.support.s3 import S3Server, Trouble, s3_fixture  # noqa: F401

# Takes the lock of a folder, says so, and waits until it is killed or told to go.
HOLDER = """
import sys
from llmbatch.errors import DataError
from llmbatch.storage.lock import Lock
from llmbatch.storage.location import Location
sys.stdin.readline()
try:
    lock = Lock.acquire(Location.at(sys.argv[1]), what="OUT")
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
def local(tmp_path: Path) -> Location:
    return Location.at(str(tmp_path))


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, local: Location) -> Iterator[Location]:
    """An empty folder, on a local disk and on S3."""
    if request.param == "local":
        yield local
        return
    server = request.getfixturevalue("s3")
    place = Location.at(f"{request.getfixturevalue('bucket')}/out", server.storage_options)
    yield place
    place.clear()


@contextlib.contextmanager
def holder(place: Location) -> Iterator[subprocess.Popen[str]]:
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that goes on when somebody sleeps."""
    clock = Clock()
    monkeypatch.setattr(llmbatch.storage.lock, "time", clock)
    return clock


class Clock:
    """Of one machine: nobody else's is looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at: dict[float, Callable[[], object]] = {}  # what happens elsewhere when so many have passed

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for when in [when for when in self.at if when <= self.seconds]:
            self.at.pop(when)()


def test_a_lock_is_one_file_while_it_is_held(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    (name,) = place.names()
    assert name.startswith("lock-000001-")
    lock.check()
    lock.release()
    lock.release()
    assert place.names() == []


def test_a_lock_says_who_holds_it(local: Location) -> None:
    lock = Lock.acquire(local, what="OUT")
    owner = Owner.parse(local.read(*local.names()) or b"", "")
    assert (owner.host, owner.pid, owner.is_here, owner.is_gone) == (socket.gethostname(), os.getpid(), True, False)
    lock.release()


def test_who_may_not_remove_files_is_told_before_anything_is_written(s3: S3Server, bucket: str) -> None:
    place = Location.at(f"{bucket}/out", s3.storage_options)
    s3.troubles[:] = [None, None, None, Trouble(403, "AccessDenied")]  # behind lists and a put, the removal
    with pytest.raises(StorageError, match=r"cannot be removed: in trouble: check the credentials"):
        Lock.acquire(place, what="it")
    s3.troubles.clear()
    assert place.names() == []


def test_a_lock_that_is_held_is_refused(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    with pytest.raises(DataError) as caught:
        Lock.acquire(place, what="OUT")
    assert str(caught.value) == (
        f"OUT is being written by process {os.getpid()} on {socket.gethostname()}: "
        "end that process or wait until it ends, or name another output"
    )
    lock.release()
    Lock.acquire(place, what="OUT").release()


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_a_process_killed_on_this_machine_loses_its_lock_at_once(local: Location, reaped: bool) -> None:
    with holder(local) as process:
        go(process)
        assert answer(process) == "held"
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        lock = Lock.acquire(local, what="OUT")
        assert [name[:11] for name in local.names()] == ["lock-000001", "lock-000002"]
        lock.check()
        lock.release()
    assert local.names() == []


def test_a_process_in_another_container_of_this_machine_loses_its_lock_when_it_ends(local: Location) -> None:
    """Its number means nothing here, but the kernel knows that nobody holds the file."""
    here = Owner.here()
    put(local, 1, replace(here, machine=f"{here.machine.split()[0]} pid:[1]", pid=1, started=1))
    Lock.acquire(local, what="OUT").release()


def test_a_process_that_got_the_number_of_a_dead_one_is_not_its_owner(place: Location) -> None:
    put(place, 1, dead())
    Lock.acquire(place, what="OUT").release()


@pytest.mark.parametrize("before", [0, 1], ids=["a free lock", "a dead owner's lock"])
def test_of_processes_that_race_one_wins(local: Location, before: int) -> None:
    for number in range(before):
        put(local, number + 1, dead())
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(holder(local)) for _ in range(4)]
        for process in processes:
            go(process)
        answers = [answer(process) for process in processes]
        winner = processes[answers.index("held")]
        assert sorted(text.partition(": ")[0] for text in answers) == sorted(
            ["held"] + 3 * [f"OUT is being written by process {winner.pid} on {socket.gethostname()}"]
        )
        go(winner)
        winner.wait()
    assert local.names() == []


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_of_threads_that_race_one_wins(tmp_path: Path, kind: str) -> None:
    place = Location.at(str(tmp_path) if kind == "disk" else f"memory://{uuid.uuid4().hex}")

    def contend(_: int) -> Lock | None:
        try:
            return Lock.acquire(place, what="OUT")
        except DataError:
            return None

    for _ in range(10):
        put(place, 1, dead())
        with ThreadPoolExecutor(8) as pool:
            (lock,) = (lock for lock in pool.map(contend, range(8)) if lock is not None)
        lock.release()
        assert place.names() == []


def test_an_owner_that_lives_is_seen_below_the_lock_of_a_dead_one(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    put(place, 2, dead())
    with pytest.raises(DataError, match=f"^OUT is being written by process {os.getpid()} "):
        Lock.acquire(place, what="OUT")
    lock.release()


def test_locks_of_several_dead_owners_elsewhere_are_watched_together(place: Location, clock: Clock) -> None:
    for number in range(1, 4):
        put(place, number, elsewhere())
    Lock.acquire(place, what="OUT").release()
    assert clock.seconds == 60.0
    assert place.names() == []


def test_an_owner_elsewhere_that_gives_a_sign_of_life_is_not_robbed_whatever_its_clock_says(
    place: Location, clock: Clock
) -> None:
    name = put(place, 1, elsewhere())
    clock.at[50.0] = lambda: put(place, 1, elsewhere(beats=1))
    with pytest.raises(DataError) as caught:
        Lock.acquire(place, what="OUT")
    assert str(caught.value) == ("OUT is being written by process 7 on far: wait until it ends, or name another output")
    assert place.names() == [name]
    assert clock.seconds == 50.0


def test_an_owner_elsewhere_is_taken_for_dead_after_a_minute_by_ones_own_clock(
    place: Location, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    put(place, 1, elsewhere(beats=9))
    lock = Lock.acquire(place, what="OUT")
    assert clock.seconds == 60.0
    assert caplog.messages == ["OUT was written by process 7 on far, and it takes 60 s to see whether it still is"]
    assert [name[:11] for name in place.names()] == ["lock-000001", "lock-000002"]
    lock.release()
    assert place.names() == []


def test_an_owner_elsewhere_that_gives_its_lock_back_is_waited_for_no_longer(place: Location, clock: Clock) -> None:
    name = put(place, 1, elsewhere())
    clock.at[20.0] = lambda: place.remove(name)
    Lock.acquire(place, what="OUT").release()
    assert clock.seconds == 20.0


def test_an_owner_whose_lock_was_taken_over_is_told_who_has_it(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    name = put(place, 2, elsewhere())
    with pytest.raises(JobError) as caught:
        lock.check()
    assert str(caught.value) == (
        "OUT was taken over by process 7 on far: "
        "this job gave no sign of life for too long, and the other one goes on from what it finished"
    )
    lock.release()
    assert place.names() == [name]


def test_an_owner_whose_lock_is_gone_is_told_so_and_leaves_the_next_one_alone(place: Location) -> None:
    lock = Lock.acquire(place, what="OUT")
    place.remove(*place.names())
    name = put(place, 1, elsewhere())
    with pytest.raises(JobError) as caught:
        lock.check()
    assert str(caught.value) == (
        "the lock of OUT was removed while this job was writing: "
        "let one job at a time write an output, and run the command again"
    )
    lock.release()
    assert place.names() == [name]


@pytest.mark.parametrize("token", ["0" * 32, "f" * 32])
def test_a_release_leaves_the_lock_of_one_that_has_just_come_alone(place: Location, token: str) -> None:
    put(place, 1, dead())
    lock = Lock.acquire(place, what="OUT")
    name = put(place, 2, replace(elsewhere(), token=token))
    lock.release()
    assert place.names() == [name]


def test_a_contender_that_finds_another_steps_back(
    place: Location, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw that the lock was free, and both wrote one. The other was first to look, and has it."""
    names = Location.names
    looks = 0

    def names_late(place: Location) -> list[str]:
        nonlocal looks
        looks += 1
        if looks == 2:
            put(place, 1, elsewhere())
            clock.at[50.0] = lambda: put(place, 1, elsewhere(beats=1))
        return names(place)

    monkeypatch.setattr(Location, "names", names_late)
    with pytest.raises(DataError, match="OUT is being written by process 7 on far"):
        Lock.acquire(place, what="OUT")
    assert names(place) == [f"lock-000001-{TOKEN}"]


def test_a_folder_that_is_removed_while_its_lock_is_taken_is_made_again(
    local: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Location.make

    def make_and_lose(place: Location) -> None:
        monkeypatch.undo()
        make(place)
        place.leave()

    monkeypatch.setattr(Location, "make", make_and_lose)
    Lock.acquire(local.child("work"), what="OUT").release()


def test_a_lock_needs_no_links(local: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    Lock.acquire(local, what="OUT").release()


def test_where_a_file_system_knows_no_flock_the_process_tells(local: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = Lock.acquire(local, what="OUT")
    with pytest.raises(DataError, match="end that process or wait until it ends"):
        Lock.acquire(local, what="OUT")
    lock.release()
    put(local, 1, dead())
    Lock.acquire(local, what="OUT").release()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"host": "far"}',
        elsewhere().dump().replace(b'"beats": 0', b'"beats": "now"'),
    ],
)
def test_a_file_that_is_no_lock_is_refused(local: Location, data: bytes) -> None:
    local.write(f"lock-000001-{TOKEN}", data)
    with pytest.raises(DataError) as caught:
        Lock.acquire(local, what="OUT")
    assert str(caught.value) == (
        f"{local.url}/lock-000001-{TOKEN} is not a lock of this version of llmbatch: remove it if no job is running"
    )


def test_a_lock_of_the_version_before_is_refused(local: Location) -> None:
    local.write("lock-000001", b"{}")
    with pytest.raises(DataError, match="lock-000001 is not a lock of this version of llmbatch: remove it if no job"):
        Lock.acquire(local, what="OUT")
