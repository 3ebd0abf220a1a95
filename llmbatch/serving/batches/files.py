"""Files of batches: uploaded ones, and those that batches wrote."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import IO, Final

from llmbatch.arguments import shown
from llmbatch.openai.texts import valid_text
from llmbatch.serving.batches.records import Record, new_id, read_records, write_record
from llmbatch.serving.refused import Refused, not_kept, unknown
from llmbatch.storage.local import make_folder, sync_folder

_RECORD: Final = "file.json"
_CONTENT: Final = "content"
PURPOSE: Final = "batch"
OUTPUT: Final = "batch_output"


class FileStore:
    """Files in a folder, each with its record in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        make_folder(str(folder))
        self._folder = folder
        self._records = read_records(folder, _RECORD)

    def add(self, content: IO[bytes], filename: str, purpose: str) -> Record:
        """Keep what was uploaded. Raises Refused for another purpose than batches, and where the disk is full."""
        if purpose != PURPOSE:
            message = f"purpose must be {PURPOSE!r}, got {shown(purpose)}"
            raise Refused(400, message, param="purpose", code="invalid_value")
        name = new_id("file-")
        try:
            with self._place(name).open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            return self._keep(name, valid_text(filename), purpose)
        except OSError as error:  # the part of it that was written would stay
            shutil.rmtree(self._folder / name, ignore_errors=True)
            raise not_kept("file", error) from None

    def adopt(self, source: Path, name: str, filename: str) -> Record:
        """Keep a file that a batch wrote, under a name that is the same each time; harmless where it is kept."""
        if name in self._records:
            return self._records[name]
        path = self._place(name)
        path.unlink(missing_ok=True)
        os.link(source, path)
        return self._keep(name, filename, OUTPUT)

    def get(self, name: str, param: str = "file_id") -> Record:
        """Return the record of a file, which `param` asks for. Raises Refused where there is none."""
        if name not in self._records:
            raise unknown("a file", name, param)
        return self._records[name]

    def content(self, name: str, param: str = "file_id") -> Path:
        """Return where a file lies, likewise."""
        self.get(name, param)
        return self._folder / name / _CONTENT

    def list(self) -> list[Record]:
        """Return the records of all files, newest first."""
        return [*self._records.values()][::-1]

    def remove(self, name: str) -> Record:
        """Remove a file; a batch that reads it has a name of its own for it. Raises Refused where there is none."""
        self.get(name)
        (self._folder / name / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._records.pop(name, None)  # another request may have removed it meanwhile
        return {"id": name, "object": "file", "deleted": True}

    def _place(self, name: str) -> Path:
        make_folder(str(self._folder / name))
        return self._folder / name / _CONTENT

    def _keep(self, name: str, filename: str, purpose: str) -> Record:
        path = self._folder / name / _CONTENT
        sync_folder(str(path.parent))
        record: Record = {
            "id": name,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        write_record(path.with_name(_RECORD), record)
        self._records[name] = record
        return record
