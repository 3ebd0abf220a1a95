"""Locks written by hand: what a job on another machine, or one that died, would leave."""

from __future__ import annotations

import time
from dataclasses import replace

from llmbatch.lock import Owner
from llmbatch.storage import Place


def put(place: Place, number: int, owner: Owner) -> None:
    """Write the lock file of this number."""
    place.write(f"lock-{number:06d}", owner.dump())


def elsewhere(silence: float) -> Owner:
    """An owner on another machine, whose heartbeat was `silence` seconds ago."""
    return replace(Owner.here(), host="far", machine="another", pid=7, token="theirs", heartbeat=time.time() - silence)
