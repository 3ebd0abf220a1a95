"""One job at a time writes an output, and the output of one that died is free again.

A lock is a file `lock-000001` with its owner's name and a heartbeat. To take over a dead owner's lock is to
create the next number, which only one of several contenders can; the highest number is the lock that counts.
An owner of this machine is dead when its process is gone, be it stuck or stopped for however long. Of an owner
elsewhere nothing but its heartbeat is known: it is taken for dead after a minute without one, and if it wakes
up after all it finds its lock taken over.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llmbatch.errors import DataError, JobError, StorageError
from llmbatch.storage import Place

HEARTBEAT = 10.0  # seconds between two signs of life
PATIENCE = 60.0  # seconds without one after which an owner elsewhere is taken for dead

_NAME = re.compile(r"lock-(\d{6,})")
_log = logging.getLogger("llmbatch")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a lock, and when it was last heard of."""

    host: str
    machine: str  # one run of one kernel, and in it one view of its processes (a container has its own)
    pid: int
    started: int  # clock ticks after the machine's start: a number is given to several processes in time
    token: str  # no two acquisitions have one
    heartbeat: float  # seconds since 1970, by the owner's clock

    @classmethod
    def here(cls) -> Owner:
        """This process, now."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None, "this process runs"
        return cls(socket.gethostname(), _machine(), pid, started, secrets.token_hex(16), time.time())

    @classmethod
    def parse(cls, data: bytes, what: str) -> Owner:
        """What a lock file says."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            raise DataError(
                f"{what} is not a lock of this version of llmbatch; remove it if no job is running"
            ) from None

    @property
    def silence(self) -> float:
        """Seconds since its heartbeat."""
        return max(0.0, time.time() - self.heartbeat)

    @property
    def is_dead(self) -> bool:
        """Whether it writes no more, as far as can be told from here."""
        if self.machine == _machine():
            return _started(self.pid) != self.started
        return self.silence > PATIENCE

    def dump(self) -> bytes:
        """What `parse` reads."""
        return json.dumps(asdict(self)).encode()

    def describe(self) -> str:
        """Who it is, and how to get past it."""
        sentence = f"{self}, last heard of {self.silence:.0f} s ago; "
        if self.machine == _machine():
            return sentence + "end that process or wait until it ends, or name another output"
        wait = max(0.0, PATIENCE - self.silence)
        return sentence + f"wait until it ends, or, if it was killed, {wait:.0f} s; or name another output"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """An output that is this process's alone, until `release`."""

    def __init__(self, place: Place, number: int, owner: Owner, what: str) -> None:
        self._place = place
        self._number = number
        self._owner = owner
        self._what = what
        self._failure: Exception | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="llmbatch-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, place: Place, *, what: str) -> Lock:
        """Take the lock that lies in `place`, which `make` has made; `what` is what the lock is of.

        Raises `DataError` when a job that may be alive has it.
        """
        while True:
            before = _numbers(place)
            if before:
                owner = _read(place, before[-1])
                if owner is None:  # released this moment
                    continue
                if not owner.is_dead:
                    raise DataError(f"{what} is being written by {owner.describe()}")
            number = before[-1] + 1 if before else 1
            mine = Owner.here()
            if not place.create(_name(number), mine.dump()):
                continue
            if set(_numbers(place)) <= {number, *before}:
                return cls(place, number, mine, what)
            place.remove(_name(number))  # another came by another number, while an owner thought dead released its own

    def check(self) -> None:
        """Raises `JobError` when the lock is another's by now, or gone, or can no longer be kept."""
        if self._failure is not None:
            raise JobError(str(self._failure)) from self._failure
        last = max(_numbers(self._place), default=0)
        if last > self._number:
            raise JobError(
                f"{self._what} was taken over by {_read(self._place, last) or 'another process'}: "
                "this job gave no sign of life for too long, and the other one goes on from what it finished"
            )
        if not self._is_ours():
            raise JobError(
                f"the lock of {self._what} was removed while this job was writing; "
                "let one job at a time write an output, and run the command again"
            )

    def release(self) -> None:
        """Give the output back. Of a lock that was taken over nothing is left to give."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        if self._is_ours():
            for number in _numbers(self._place):  # one's own comes after those of the dead
                if number <= self._number:
                    self._place.remove(_name(number))

    def _is_ours(self) -> bool:
        owner = _read(self._place, self._number)
        return owner is not None and owner.token == self._owner.token

    def _keep(self) -> None:
        while not self._released.wait(HEARTBEAT):
            try:
                self.check()
                owner = replace(self._owner, heartbeat=time.time())
                self._place.write(_name(self._number), owner.dump())
            except StorageError as error:  # it may be better next time
                _log.warning("the heartbeat of the lock of %s failed: %s", self._what, error)
            except Exception as error:
                self._failure = error
                return


def _name(number: int) -> str:
    return f"lock-{number:06d}"


def _numbers(place: Place) -> list[int]:
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, place.names()) if match)


def _read(place: Place, number: int) -> Owner | None:
    data = place.read(_name(number))
    return None if data is None else Owner.parse(data, place.shown(_name(number)))


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process of this machine was started, or None where it is gone; a zombie is."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # a program's name may hold anything
    return None if state in "ZXx" else int(fields[18])
