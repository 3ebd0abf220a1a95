"""The folder where llmbatch keeps what it makes once for a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: `$LLMBATCH_CACHE`, else `llmbatch` in the user's cache folder."""
    if chosen := os.environ.get("LLMBATCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmbatch"
