"""Where llmbatch keeps what is made once for a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what is made once is kept: `$LLMBATCH_CACHE`, else `llmbatch` in the user's cache folder."""
    if chosen := os.environ.get("LLMBATCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmbatch"
