"""Digests of whole files: two files of equal digest hold equal bytes.

The hub's cache already names a file by the hash of its content. Any other file is hashed in full once; the digest is
kept with the file's metadata, which changes as soon as the file is written to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_SMALL: Final = 1 << 20  # bytes that are read sooner than a kept digest is looked for
_SETTLED: Final = 2.0  # seconds since the last change, before which another one may bear the same time
_SLOW: Final = 4 << 30  # bytes whose hashing takes some seconds, and is said
_THREADS: Final = 4  # files hashed at the same time
_BLOB: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 of git, or SHA-256 of large files

_log = logging.getLogger("llmbatch")


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """Digest the content of each file; digests of large files are kept in the folder `cache`."""
    known = [_of_blob(file) or _kept(file, cache) for file in files]
    unknown = [file for file, name in zip(files, known, strict=True) if name is None]
    nbytes = sum(file.stat().st_size for file in unknown)
    if nbytes > _SLOW:
        _log.warning("reading the %.0f GB of the model once, to know it again by its content", nbytes / 1e9)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashed = iter(list(pool.map(lambda file: _hash(file, cache), unknown)))
    return [name or next(hashed) for name in known]


def digest(file: Path, cache: Path) -> str:
    """Digest the content of one file."""
    return digests([file], cache)[0]


def _of_blob(file: Path) -> str | None:
    """Return the name that the hub's cache gives the content of a file; None if the file lies elsewhere."""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) else None


def state_of(file: Path) -> list[int]:
    """Return metadata that changes with a file, even if its size stays and its time is set back."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino]


def _note(file: Path, cache: Path) -> Path:
    """Return the place where the digest of a file is kept."""
    return cache / "digests" / f"{hashlib.blake2b(os.fsencode(file.resolve()), digest_size=16).hexdigest()}.json"


def _kept(file: Path, cache: Path) -> str | None:
    if file.stat().st_size < _SMALL:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(_note(file, cache).read_bytes())
        if kept["state"] == state_of(file) and isinstance(kept["digest"], str):
            return kept["digest"]
    return None


def _hash(file: Path, cache: Path) -> str:
    before = state_of(file)
    with file.open("rb") as stream:
        name = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    changed = max(file.stat().st_mtime, file.stat().st_ctime)
    if before[0] >= _SMALL and state_of(file) == before and time.time() - changed > _SETTLED:
        note = _note(file, cache)
        unfinished = note.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # a cache that cannot be written costs another reading, and no more
            note.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"state": before, "digest": name}))
            unfinished.replace(note)
    return name
