"""What an output's work folder says of names in the output: which are to go, and what is to get which.

No file system gives many files their names at once. So the end of a job, be it committed or discarded, is written
down before anything is done, and whoever comes next can go through with it: each of its steps may be done twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Names:
    """Names of Parquet files in an output's folder while a job works."""

    replaced: Sequence[str] = ()  # there before the job began; they go when it ends
    published: Mapping[str, str] = field(default_factory=dict)  # names given before it ends, by staged part

    @classmethod
    def decode(cls, data: bytes) -> Names:
        """Those that were encoded."""
        return cls(**json.loads(data))

    def encode(self) -> bytes:
        """The names as they are written."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends. Without files and manifest it is discarded; without anything all is in place already."""

    removed: Sequence[str] = ()  # names in the output's folder, unless a file has got that name since
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names, and the staged files each is made of
    manifest: Mapping[str, Any] | None = None

    @classmethod
    def decode(cls, data: bytes) -> Ending:
        """The one that was encoded."""
        return cls(**json.loads(data))

    def encode(self) -> bytes:
        """The ending as it is written."""
        return json.dumps(asdict(self)).encode()
