"""A lock on an output: one job at a time writes it, and the lock of a dead job is free again.

A lock is a file `lock-000001-NAME` with a unique name. A job holds the lock if it has written its file and then lists
no other file but those it saw before, whose owners are dead. If it lists another, it removes its own and looks again.
Of two contenders at least one sees the other, as each lists after it has written. So a lock needs of a store only that
it lists what was written, and nobody ever removes a file that may be another's. The highest number counts.

An owner on this machine is dead when its process is gone. On a disk the file system knows that: the owner holds an
`flock` on its file from before it appears until the process ends, whatever ends it. An owner on another machine shows
only a heartbeat: a count in its file, raised every ten seconds. A process that finds such a lock watches it for a
minute by its own clock, and takes it over if the count does not change. Clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from llmbatch.errors import DataError, JobError, StorageError
from llmbatch.storage.local import UNFINISHED, HeldFile, is_held
from llmbatch.storage.location import Location

HEARTBEAT: Final = 10.0  # seconds between two signs of life
PATIENCE: Final = 60.0  # seconds without one after which an owner elsewhere is taken for dead
_LOOK: Final = 2.0  # seconds between two looks at the lock of an owner elsewhere
_BACK_OFF: Final = 0.05  # seconds, at most, until one that met another contender tries again

_DIGITS: Final = 10  # of a count, at most

_NAME = re.compile(r"lock-(\d{6,12})-([0-9a-f]{32})")
_GIVEN_UP: set[str] = set()  # tokens of locks that this process released, also where the store could not be told
_log = logging.getLogger("llmbatch")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a lock."""

    host: str
    machine: str  # one run of one kernel, and in it one view of its processes (a container has its own)
    pid: int
    started: int  # clock ticks after the machine's start: a number is given to several processes in time
    token: str  # no two acquisitions have one
    beats: int = 0  # signs of life so far

    @classmethod
    def here(cls) -> Owner:
        """Describe this process, now."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None, "this process runs"
        return cls(socket.gethostname(), _machine(), pid, started, secrets.token_hex(16))

    @classmethod
    def parse(cls, data: bytes, what: str) -> Owner:
        """Parse the content of a lock file."""
        try:
            owner = cls(**json.loads(data))
            known = asdict(owner)
            if all(type(known[name]) is (int if kind == "int" else str) for name, kind in cls.__annotations__.items()):
                return owner
        except (ValueError, RecursionError, TypeError):
            pass
        raise DataError(f"{what} is not a lock of this version of llmbatch: remove it if no job is running")

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, seen from the same container."""
        return self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether the process of this machine has ended."""
        return self.is_here and _started(self.pid) != self.started

    def dump(self) -> bytes:
        """Encode for `parse`; equally long for every count, so that it can be overwritten."""
        least = len(json.dumps({**asdict(self), "beats": 0}))
        return json.dumps(asdict(self)).encode().ljust(least + _DIGITS)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """The right of this process alone to write an output, until `release`."""

    def __init__(
        self, place: Location, name: str, owner: Owner, held: HeldFile | None, what: str, dead: Sequence[str]
    ) -> None:
        """Hold a lock; `dead` are the locks of dead owners."""
        self._place = place
        self._name = name
        self._dead = dead
        self._owner = owner
        self._held = held
        self._what = what
        self._failure: Exception | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="llmbatch-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, place: Location, *, what: str) -> Lock:
        """Take the lock in `place`, which is made; `what` names the locked thing in messages.

        Raises `DataError` if a living job holds it.
        """
        while True:
            place.make()
            before = _locks(place)
            if not _are_free(place, before, what):
                continue
            owner = Owner.here()
            name = f"lock-{_number(before[-1]) + 1 if before else 1:06d}-{owner.token}"
            held = None
            if place.local:
                held = HeldFile.make(place.root, name, owner.dump(), place.shown(name))
                if held is None:  # the one that released it removed the folder
                    continue
            else:
                _try_to_remove(place, owner)
                place.write(name, owner.dump())
            locks = set(_locks(place))
            if name in locks and locks <= {name, *before}:
                return cls(place, name, owner, held, what, before)
            try:
                place.remove(name)
            finally:
                if held is not None:
                    held.close()
            time.sleep(random.uniform(0, _BACK_OFF))

    def check(self) -> None:
        """Raise `JobError` if another process has taken the lock, or it is gone, or can no longer be kept."""
        if self._failure is not None:
            raise JobError(str(self._failure)) from self._failure
        locks = _locks(self._place)
        if self._name not in locks:
            raise JobError(
                f"the lock of {self._what} was removed while this job was writing: "
                "let one job at a time write an output, and run the command again"
            )
        if _number(locks[-1]) > _number(self._name):
            raise JobError(
                f"{self._what} was taken over by {_read(self._place, locks[-1]) or 'another process'}: "
                "this job gave no sign of life for too long, and the other one goes on from what it finished"
            )

    def release(self) -> None:
        """Give the output back. Removes only one's own file, also if the lock was taken over."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        _GIVEN_UP.add(self._owner.token)
        try:
            # Of a lock that was taken over only one's own file is left, and the dead are the other's to bury.
            if self._name in _locks(self._place):
                for name in (*self._dead, self._name):
                    self._place.remove(name)
        finally:
            if self._held is not None:
                self._held.close()

    def _keep(self) -> None:
        beats = 0
        while not self._released.wait(HEARTBEAT):
            try:
                self.check()
                beats += 1
                data = replace(self._owner, beats=beats).dump()
                if self._held is None:
                    self._place.write(self._name, data)
                else:
                    self._held.write(data)
            except StorageError as error:  # it may be better next time
                _log.warning("the heartbeat of the lock of %s failed: %s", self._what, error)
            except Exception as error:
                self._failure = error
                return


def is_lock(name: str) -> bool:
    """Tell whether a file has the name of a lock, of this version or of another one."""
    return name.startswith("lock-")


def _try_to_remove(place: Location, owner: Owner) -> None:
    """Raise `StorageError` where a file may be put but not removed: a job could then do all but end."""
    name = UNFINISHED + owner.token
    place.write(name, b"")
    place.remove(name)


def _locks(place: Location) -> list[str]:
    """List the names of all locks, by number."""
    names = list(filter(is_lock, place.names()))
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise DataError(
                f"{place.shown(name)} is not a lock of this version of llmbatch: remove it if no job is running"
            )
    return sorted(names, key=lambda name: (_number(name), name))


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None, "it is a lock's name"
    return int(match[1])


def _read(place: Location, name: str) -> Owner | None:
    data = place.read(name)
    return None if data is None else Owner.parse(data, place.shown(name))


def _are_free(place: Location, names: Sequence[str], what: str) -> bool:
    """Tell whether the owners of all locks are dead; False if a lock is gone. Raises `DataError` if one lives.

    All are looked at: one that lives may stand below the lock of a contender that has just given up.
    """
    silent: dict[str, Owner] = {}
    for name in names:
        owner = _read(place, name)
        if owner is None:
            return False
        held = is_held(place.path(name)) if place.local else None
        is_unheld = held is False and owner.machine.split()[0] == _machine().split()[0]  # one kernel knows
        if owner.is_gone or is_unheld or owner.token in _GIVEN_UP:
            continue
        if held or owner.is_here:
            raise _refusal(owner, what)
        silent[name] = owner
    return not silent or _heartbeats_stop(place, silent, what)


def _heartbeats_stop(place: Location, owners: dict[str, Owner], what: str) -> bool:
    """Watch owners elsewhere until their heartbeats have stopped for long; False if one released its lock.

    Raises `DataError` at the first beat.
    """
    for owner in owners.values():
        _log.warning("%s was written by %s, and it takes %g s to see whether it still is", what, owner, PATIENCE)
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        time.sleep(_LOOK)
        for name, owner in owners.items():
            now = _read(place, name)
            if now is None:
                return False
            if now != owner:
                raise _refusal(owner, what)
    return True


def _refusal(owner: Owner, what: str) -> DataError:
    end = "end that process or " if owner.is_here else ""
    return DataError(f"{what} is being written by {owner}: {end}wait until it ends, or name another output")


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Return the start time of a process of this machine, or None if it is gone; a zombie is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # a program's name may hold anything
    return None if state in "ZXx" else int(fields[18])
