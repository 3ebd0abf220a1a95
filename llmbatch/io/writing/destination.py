"""The place of an output, and whether it may lie there: apart from the inputs, and writable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import has_magic, split_protocol
from fsspec.utils import glob_translate

from llmbatch.errors import DataError
from llmbatch.io.writing.work_files import is_of_a_job
from llmbatch.storage.location import Location
from llmbatch.storage.retries import RetryTime

_FIRST_PATIENCE = 5.0  # seconds
FILE_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
_OTHER_SUFFIXES = (
    *(".pq", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".orc", ".avro", ".xlsx"),
    *(".gz", ".zst", ".bz2", ".xz", ".lz4", ".br", ".zip", ".snappy", ".tar"),
)


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder of Parquet parts, or one file."""

    url: str  # an absolute path or a URL
    suffix: str  # of each part, or of the file
    file: str | None  # name of the one file; None for a folder
    folder: Location  # that the parts lie in, or the file
    work: Location  # what is not finished lies here
    manifest: str  # its name in `folder`
    old_manifest: str  # the name that earlier versions gave it

    @property
    def manifests(self) -> tuple[str, ...]:
        """The names of a manifest, including those of earlier versions."""
        return tuple(dict.fromkeys((self.manifest, self.old_manifest)))

    @classmethod
    def parse(cls, url: str, storage_options: Mapping[str, Any] | None) -> Destination:
        """Parse an output's path or URL. Raises `DataError` if the name cannot be that of an output."""
        if not url:
            raise DataError("an output must be a path or a URL, got ''")
        if url == "-":
            raise DataError(
                "an output must be a path or a URL, got '-': the standard output takes no rows, name a file"
            )
        protocol, path = split_protocol(url)
        if protocol in (None, "file", "local"):
            url = os.path.abspath(os.path.expanduser(path))
        elif not path.strip("/"):
            raise DataError(f"an output must have a bucket or a host, got {url!r}: give it as {protocol}://NAME/FOLDER")
        url = url.rstrip("/") or "/"
        above, _, name = url.rpartition("/")
        suffix = next((suffix for suffix in reversed(FILE_SUFFIXES) if name.endswith(suffix)), None)
        if suffix is None:
            if name.lower().endswith((*FILE_SUFFIXES, *_OTHER_SUFFIXES)):
                raise DataError(
                    f"an output must be a folder, or a file that ends in {', '.join(FILE_SUFFIXES)}, got {url!r}"
                )
            folder = Location.at(url, storage_options)
            return cls(url, ".parquet", None, folder, folder.child("_llmbatch"), "_llmbatch.parquet", "_llmbatch.json")
        folder = Location.at(above + "/" if above in ("", f"{protocol}:/") else above, storage_options)
        manifest = f"{name}._llmbatch.json"
        return cls(url, suffix, name, folder, folder.child(f"{name}._llmbatch"), manifest, manifest)

    @property
    def errors(self) -> str:
        """The name of the file for rows that failed, beside the one file."""
        assert self.file is not None, "nothing lies beside a folder"
        return f"{self.file.removesuffix(self.suffix)}.errors{self.suffix}"

    @property
    def columns(self) -> str:
        """The name of the file that holds as columns what the one file and `errors` hold as lines."""
        return f"{self.file}._llmbatch.arrow"

    def check_apart(self, inputs: Sequence[str], *, has_errors: bool = False) -> None:
        """Raise `DataError` if the output, or the file of its errors, is an input, or one lies in the other."""
        out = self._path_of(self.url)
        errors = self._path_of(f"{self.folder.url.rstrip('/')}/{self.errors}") if has_errors else None
        for name in inputs:
            given = self._path_of(name)
            if given is not None and given == errors:
                raise DataError(
                    f"the output must not be an input, but the errors of {self.url} are written to {name}: choose "
                    "another name"
                )
            if given is None or out is None:
                continue
            if has_magic(name) and self._matched_by(given):
                raise DataError(
                    f"the output must not match an input, but {name} matches {self.url}, and the answers would be read "
                    "as input the next time: choose another place"
                )
            if out == given:
                raise DataError(f"the output must not be an input, got {self.url}: choose another name")
            if given in out.parents or out in given.parents:
                where = "inside" if given in out.parents else "around"
                raise DataError(
                    f"the output must lie apart from the inputs, but {self.url} is {where} {name}: choose another place"
                )

    def check_place(self) -> None:
        """Raise `DataError` if something of another kind is there, also in the work folder, or nothing can be written.

        Of an object store only its answering can be checked; whether it accepts objects shows when a job begins.
        """
        there = self._kind()
        wanted = "folder" if self.file is None else "file"
        if there not in (wanted, None):
            raise DataError(f"the output {self.url} must be a {wanted} by its name, but a {there} is there")
        if self.folder.local:
            self._check_local()
        self._check_work()

    def has_file(self) -> bool:
        """Tell whether the one file is there."""
        assert self.file is not None, "a folder is no file"
        return self.folder.size(self.file) is not None

    def final_names(self, parts: Sequence[str], published: Mapping[str, str]) -> list[str]:
        """Give each staged part the name of the file that it becomes, or is put into."""
        if self.file is not None:
            return [self.file] * len(parts)
        numbered = (f"part-{number:05d}.parquet" for number in count())
        free = (name for name in numbered if name not in published.values())
        return [published.get(part) or next(free) for part in parts]

    def is_part(self, name: str) -> bool:
        """Tell whether `name` in the folder is that of a Parquet file."""
        return name.endswith(".parquet") and not (self.folder.local and os.path.isdir(self.folder.path(name)))

    def _matched_by(self, pattern: PurePosixPath) -> bool:
        """Tell whether a glob matches the output, or a part in it."""
        out = self._path_of(self.url)
        assert out is not None
        glob = re.compile(glob_translate(str(pattern)))
        return any(glob.match(str(path)) for path in (out, out / "part-00000.parquet"))

    def _kind(self) -> str | None:
        """Return the kind of what is there, if anything."""
        if self.folder.local:
            return None if not os.path.exists(self.url) else "folder" if os.path.isdir(self.url) else "file"
        # A store that does not answer at all is a wrong name rather than one that is away for a while.
        folder = replace(self.folder, retry_time=RetryTime(_FIRST_PATIENCE))
        within = folder if self.file is None else folder.child(self.file)
        if within.names():
            return "folder"
        return "file" if self.file is not None and self.has_file() else None

    def _check_work(self) -> None:
        """Raise `DataError` if something else lies in the place of the work folder, which goes when a job ends."""
        if self.work.local and (os.path.islink(self.work.root) or os.path.isfile(self.work.root)):
            raise DataError(
                f"{self.work.url}, where jobs keep their work, must be a folder and no link: move what is there away"
            )
        foreign = next((name for name in self.work.names() if not is_of_a_job(name)), None)
        if foreign is not None:
            raise DataError(
                f"{self.work.shown(foreign)} was written by no job, and would go when one ends: move it away"
            )

    def _check_local(self) -> None:
        path = Path(self.url)
        if path.is_symlink() and not path.exists():
            raise DataError(f"the output {self.url} must not be a link to nothing: remove it, or name its target")
        near = path.parent
        while not near.exists():
            near = near.parent
        if not near.is_dir():
            raise DataError(f"the output {self.url} must lie in a folder, but {near} is a file")
        target = path if path.is_dir() else near
        if not os.access(target, os.W_OK | os.X_OK):
            raise DataError(f"the output {self.url} must lie where it can be written, but {target} cannot")

    def _path_of(self, name: str) -> PurePosixPath | None:
        """Return the true path of a file or folder on the output's file system, or None if it lies on another."""
        name = name.rpartition("::")[2] if "://" in name else name
        protocol, path = split_protocol(name)
        known = self.folder.filesystem.protocol
        if (protocol or "file") not in ([known] if isinstance(known, str) else known):
            return None
        if self.folder.local:
            return PurePosixPath(os.path.realpath(os.path.expanduser(path)))
        return PurePosixPath(self.folder.filesystem._strip_protocol(name))
