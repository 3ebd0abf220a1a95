"""Locks written by hand: what a job on another machine, or one that died, would leave."""

from __future__ import annotations

from dataclasses import replace

from llmbatch.storage.location import Location
from llmbatch.storage.lock import Owner

TOKEN = "0123456789abcdef" * 2


def put(place: Location, number: int, owner: Owner) -> str:
    """Write a lock of this number; its name."""
    name = f"lock-{number:06d}-{owner.token}"
    place.write(name, owner.dump())
    return name


def elsewhere(beats: int = 0) -> Owner:
    """An owner on another machine."""
    return replace(Owner.here(), host="far", machine="another one", pid=7, token=TOKEN, beats=beats)


def dead() -> Owner:
    """An owner on this machine whose process is gone."""
    return replace(Owner.here(), started=1)
