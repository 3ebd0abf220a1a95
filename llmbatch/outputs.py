"""Arrow tables to files that appear whole or not at all.

Work is staged beside its destination, on the same disk, and renamed at the end; a small manifest, written
last, says that the output is complete and which command made it. Where things lie:

    a folder OUT    OUT/part-00000.parquet, ...   work in OUT/_llmbatch/   manifest OUT._llmbatch.json
    one file OUT    OUT (.parquet or .jsonl)      work in OUT._llmbatch/   manifest OUT._llmbatch.json

The manifest is beside a folder, not in it, because some readers of a folder (Polars) refuse it when it holds
any file that is not Parquet, hidden or not. While work is in progress the same readers are meant to refuse:
they would take staged files for Parquet if nothing else were there, so `job.json` lies beside those.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.errors import DataError, JobError
from llmbatch.staging import JsonlPart, ParquetPart, Part

FORMAT_VERSION = 1
PART_ROWS = 100_000  # most rows of a part, so that readers can share an output out

_FILE_SUFFIXES = (".parquet", ".jsonl")
_OTHER_SUFFIXES = (".pq", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".arrow", ".feather")
_OVERWRITE = "choose another name, or replace it with overwrite=True (--overwrite)"


class Output:
    """One job's output: a folder of Parquet parts, or one `.parquet` or `.jsonl` file.

    `open`, then `begin`, `write` any number of times but at least once, and `commit`; `abort` at any time
    before `commit` has returned leaves nothing of the job behind.
    """

    def __init__(self, path: Path, fingerprint: str, overwrite: bool) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._overwrite = overwrite
        self._is_folder = path.suffix not in _FILE_SUFFIXES
        self._work = path / "_llmbatch" if self._is_folder else path.with_name(path.name + "._llmbatch")
        self._manifest = path.with_name(path.name + "._llmbatch.json")
        self._suffix = ".parquet" if self._is_folder else path.suffix
        self._summary: dict[str, object] | None = None
        self._part: Part | None = None
        self._staged: list[tuple[Path, int]] = []  # closed parts and their rows
        self._made: list[Path] = []  # folders, outermost first
        self._placed: list[Path] = []  # parts under their names before the manifest is there

    @classmethod
    def open(cls, path: str, *, inputs: Sequence[str], fingerprint: str, overwrite: bool) -> Output:
        """Check everything that can be checked, and create nothing.

        `inputs` are the paths read, `fingerprint` is what makes the command the same one. Raises `DataError`
        when the output is or touches an input, when its place cannot be written, and when something is there
        already that is not this command's finished output and `overwrite` is not set.
        """
        if "://" in path or not path:
            raise DataError(f"an output must be a local path, got {path!r}")
        destination = Path(os.path.abspath(path))
        if destination.suffix in _OTHER_SUFFIXES:
            raise DataError(f"an output must be a folder, a .parquet file or a .jsonl file, got {path!r}")
        output = cls(destination, fingerprint, overwrite)
        output._check_apart(inputs)
        output._check_place()
        if not overwrite:
            output._summary = output._read_summary()
        if not output.finished:
            output._check_free()
        return output

    @property
    def path(self) -> str:
        """The absolute path of the output."""
        return str(self._path)

    @property
    def finished(self) -> bool:
        """Whether the finished output of this very command is there."""
        return self._summary is not None

    @property
    def summary(self) -> Mapping[str, object]:
        """What `commit` was given, also by an earlier run of the same command; only when `finished`."""
        assert self._summary is not None, "an output that is not finished has no summary"
        return self._summary

    def check(self, schema: pa.Schema) -> None:
        """Raise `DataError` when a column of this type cannot be written, before hours are spent on it."""
        if self._suffix == ".jsonl":
            return
        for field in schema:
            try:
                pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
            except (pa.ArrowException, NotImplementedError):
                raise DataError(
                    f"Parquet cannot hold column {field.name!r} of type {field.type}: drop it or convert it"
                ) from None

    def begin(self) -> None:
        """Make the folders that work needs. Raises `DataError` when they cannot be made."""
        try:
            for folder in [*reversed(self._work.parent.parents), self._work.parent]:
                if not folder.exists():
                    folder.mkdir()
                    self._made.append(folder)
            if self._overwrite and self._work.exists():
                shutil.rmtree(self._work)
            self._work.mkdir()
            self._made.append(self._work)
            (self._work / "job.json").write_text(json.dumps({"fingerprint": self._fingerprint}))
        except OSError as error:
            self.abort()
            raise DataError(f"the output {self._path} cannot be made: {error}") from None

    def write(self, table: pa.Table) -> None:
        """Stage rows; all tables have one schema. Raises `JobError` when the disk refuses."""
        assert self._work in self._made, "write needs begin"
        limit = PART_ROWS if self._is_folder else sys.maxsize
        kind = JsonlPart if self._suffix == ".jsonl" else ParquetPart
        try:
            while table.num_rows or not (self._part or self._staged):
                if self._part is None:
                    self._part = kind(self._work / self._staged_name(), table.schema)
                room = limit - self._part.rows
                self._part.write(table.slice(0, room))
                table = table.slice(room)
                if self._part.rows == limit:
                    self._close_part()
        except OSError as error:
            raise JobError(f"the output {self._path} cannot be written: {error}") from error

    def commit(self, summary: Mapping[str, object]) -> None:
        """Give the parts their names, remove what they replace, and say that the output is complete.

        Raises `JobError` when the disk refuses; `abort` then takes back the parts that were named.
        """
        try:
            if self._part is not None:
                self._close_part()
            assert self._staged, "commit needs a table"
            self._remove_old()
            parts = []
            for staged, rows in self._staged:
                place = self._path / staged.stem if self._is_folder else self._path
                os.replace(staged, place)
                self._placed.append(place)
                parts.append({"name": place.name, "rows": rows})
            _sync_folder(self._path if self._is_folder else self._path.parent)
            shutil.rmtree(self._work)
            manifest = {
                "format": FORMAT_VERSION,
                "fingerprint": self._fingerprint,
                "parts": parts,
                "summary": dict(summary),
            }
            self._write_manifest(manifest)
        except OSError as error:
            raise JobError(f"the output {self._path} cannot be put in place: {error}") from error
        self._summary = dict(summary)
        self._made.clear()
        self._placed.clear()

    def abort(self) -> None:
        """Remove everything that `begin` and what followed made; does nothing once committed."""
        if self._part is not None:
            with contextlib.suppress(Exception):  # the file is removed whatever its state
                self._part.close()
            self._part = None
        for place in self._placed:
            place.unlink(missing_ok=True)
        self._placed.clear()
        self._staged.clear()
        if self._work in self._made:
            shutil.rmtree(self._work, ignore_errors=True)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # someone else has put something there
                folder.rmdir()
        self._made.clear()

    def _staged_name(self) -> str:
        return f"part-{len(self._staged):05d}{self._suffix}.staged"

    def _close_part(self) -> None:
        assert self._part is not None
        part, self._part = self._part, None
        name = self._staged_name()
        part.close()
        self._staged.append((self._work / name, part.rows))

    def _check_apart(self, inputs: Sequence[str]) -> None:
        out = Path(os.path.realpath(self._path))
        for name in inputs:
            if "://" in name and not name.startswith("file://"):
                continue
            given = Path(os.path.realpath(name.removeprefix("file://")))
            if out == given:
                raise DataError(f"the output must not be an input, got {self._path}: choose another name")
            if given in out.parents or out in given.parents:
                where = "inside" if given in out.parents else "around"
                raise DataError(
                    f"the output must lie apart from the inputs, but {self._path} is {where} {name}: "
                    "choose another place"
                )

    def _check_place(self) -> None:
        if self._path.exists() and self._path.is_dir() != self._is_folder:
            is_, want = ("folder", "file") if self._path.is_dir() else ("file", "folder")
            raise DataError(f"the output {self._path} must be a {want} by its name, but a {is_} is there")
        near = self._path.parent
        while not near.exists():
            near = near.parent
        if not near.is_dir():
            raise DataError(f"the output {self._path} must lie in a folder, but {near} is a file")
        target = self._path if self._path.is_dir() else near
        if not os.access(target, os.W_OK | os.X_OK):
            raise DataError(f"the output {self._path} must lie where it can be written, but {target} cannot")

    def _check_free(self) -> None:
        if self._work.exists() and not self._overwrite:
            raise DataError(
                f"another job is writing {self._path}, or was killed and left {self._work}: wait for it, "
                "or discard its work with overwrite=True (--overwrite)"
            )
        if self._is_folder and self._path.exists():
            for entry in sorted(self._path.iterdir()):
                if entry != self._work and not self._overwrite:
                    raise DataError(f"the output {self._path} is not empty, it holds {entry.name}: {_OVERWRITE}")
                if not entry.name.startswith(("_", ".")) and not _is_part(entry):
                    raise DataError(
                        f"only Parquet files are overwritten, but {self._path} also holds {entry.name}: "
                        "choose another folder"
                    )
        elif self._path.exists() and not self._overwrite:
            raise DataError(f"the output {self._path} is already there: {_OVERWRITE}")

    def _read_summary(self) -> dict[str, object] | None:
        """The summary of this command's finished output; None when that is not what is there."""
        try:
            manifest: Any = json.loads(self._manifest.read_text())
            if (manifest["format"], manifest["fingerprint"]) != (FORMAT_VERSION, self._fingerprint):
                return None
            folder = self._path if self._is_folder else self._path.parent
            whole = all((folder / part["name"]).is_file() for part in manifest["parts"])
            return dict(manifest["summary"]) if whole else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _remove_old(self) -> None:
        self._manifest.unlink(missing_ok=True)
        for entry in self._path.iterdir() if self._is_folder else ():
            if _is_part(entry):
                entry.unlink()

    def _write_manifest(self, manifest: Mapping[str, object]) -> None:
        staged = self._manifest.with_name(self._manifest.name + ".staged")
        with staged.open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, self._manifest)
        _sync_folder(self._manifest.parent)


def _is_part(entry: Path) -> bool:
    return entry.suffix == ".parquet" and entry.is_file()


def _sync_folder(folder: Path) -> None:
    """Put renames on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
