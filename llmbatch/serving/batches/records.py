"""Small records of a folder, as JSON files: whole or not there, and the same after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import IO, Any, Final

from llmbatch.errors import ParameterError
from llmbatch.storage.local import UNFINISHED, make_folder, sync_folder

_LOCK: Final = "lock"
_ID: Final = re.compile(r"(?:file-(?:(?:output|error)-batch_)?|batch_)[0-9a-f]{32}")  # of a folder here
Record = dict[str, Any]


def new_id(kind: str) -> str:
    """Make an id that begins with its kind, such as "batch_"; of one kind, ids that are made later come after it."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(8)}"


def write_record(path: Path, record: Record) -> None:
    """Replace a record, so that it is on the disk when this returns."""
    draft = path.with_name(UNFINISHED + path.name)
    with draft.open("w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(str(path.parent))


def read_records(folder: Path, name: str) -> dict[str, Record]:
    """Read the record `name` in each folder of a folder, oldest first; passes over what is not whole.

    Those of one second have the order of their ids (`new_id`). A kill may leave a folder that has no record yet, or
    none any more. Nobody knows of its name: it is removed.
    """
    found = {}
    for place in folder.iterdir():
        path = place / name
        if _ID.fullmatch(place.name) and not path.exists():
            shutil.rmtree(place, ignore_errors=True)
            continue
        with contextlib.suppress(OSError, ValueError):
            found[place.name] = json.loads(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items(), key=lambda item: (item[1]["created_at"], item[0])))


class StateFolder:
    """The folder of an endpoint's files and batches, of which one process may use it at a time."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> StateFolder:
        """Make the folder, or take the one that is there. Raises ParameterError where another process has it."""
        try:
            make_folder(str(path))
            lock = (path / _LOCK).open("a", encoding="utf-8")
        except OSError as error:
            raise ParameterError(
                f"state_dir must be a folder that can be written to, got {str(path)!r}: {error.strerror}",
                option="state_dir", value=str(path),
            ) from None  # fmt: skip  # as few lines as may be
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ParameterError(
                f"state_dir must be one endpoint's alone, got {str(path)!r}, which another uses: choose another "
                "(--state-dir)",
                option="state_dir", value=str(path),
            ) from None  # fmt: skip  # as few lines as may be
        return cls(path, lock)

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()
