"""Where the repository and the request traces are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TRACES: Final = Path(os.environ.get("LLMBATCH_TRACES") or "$LLMBATCH_TRACES")  # which is not there: tests skip
