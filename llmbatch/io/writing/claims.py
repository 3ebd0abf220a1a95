"""Which names in an output's folder a job may replace or remove: its own only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from llmbatch.errors import DataError
from llmbatch.io.sealed_json import damage
from llmbatch.io.writing.commit_log import CommitRecord, Names
from llmbatch.io.writing.destination import Destination
from llmbatch.io.writing.finished import Finished
from llmbatch.io.writing.work_files import ENDING

_OVERWRITE = "choose another name, or replace it with overwrite=True (--overwrite)"


@dataclass(frozen=True, slots=True)
class Claims:
    """The names that may be touched at a destination."""

    destination: Destination
    has_errors: bool = False  # the output is to have a file of errors beside its one

    def check_free(self, *, replace_foreign: bool) -> None:
        """Raise `DataError` if the place holds something that llmbatch did not write and must not replace."""
        to = self.destination
        ours = self._ours()
        if to.file is not None:
            if not replace_foreign and not ours and to.has_file():
                raise DataError(f"the output {to.url} is already there: {_OVERWRITE}")
            there = self.has_errors and to.folder.size(to.errors) is not None
            if there and not replace_foreign and to.errors not in ours:
                raise DataError(f"{to.errors}, for the errors of {to.url}, is already there: {_OVERWRITE}")
            return
        for name in to.folder.names():
            if name in ours or name in ("_llmbatch", *to.manifests):
                continue
            if not replace_foreign:
                raise DataError(f"the output {to.url} is not empty, it holds {name}: {_OVERWRITE}")
            if not name.startswith(("_", ".")) and not to.is_part(name):
                raise DataError(
                    f"only Parquet files are overwritten, but {to.url} also holds {name}: choose another folder"
                )

    def check_new(self, names: Iterable[str]) -> None:
        """Raise `DataError` if something else got one of these names, or that of errors, since the job began."""
        to, ours = self.destination, self._ours()
        for name in (*names, to.errors) if self.has_errors else names:
            if name not in ours and to.folder.size(name) is not None:
                raise DataError(
                    f"{name} came to the output {to.url} while the job ran, and is not the job's: move it away, and "
                    "run the same command again"
                )

    def replaced(self) -> list[str]:
        """List the names that are removed when a new output is complete."""
        to = self.destination
        if to.file is not None:
            names = dict.fromkeys([to.file, *([to.errors] if self.has_errors else ()), *Finished(to).names()])
            return [name for name in names if to.folder.size(name) is not None]
        return [name for name in to.folder.names() if to.is_part(name) and name not in to.manifests]

    def check(self, ending: CommitRecord) -> None:
        """Raise `DataError` if a commit record would touch names that cannot be the output's."""
        to = self.destination
        for name in [*ending.removed, *ending.files, *(ending.replaced or ())]:
            ours = name.endswith(".parquet") if to.file is None else name in (to.file, to.errors, to.columns)
            if name not in to.manifests and not ours:
                raise damage(to.work, ENDING)

    def _ours(self) -> set[str]:
        """List names that our jobs gave or were allowed to replace. An unreadable file proves nothing."""
        to = self.destination
        ours = set(Finished(to).names())
        with contextlib.suppress(DataError):
            names = Names.read(to.work) or Names()
            ours |= {*names.published.values(), *names.replaced}
        with contextlib.suppress(DataError):
            ending = CommitRecord.read(to.work) or CommitRecord()
            ours |= {*ending.removed, *ending.files, *(ending.replaced or ())}
        return ours
