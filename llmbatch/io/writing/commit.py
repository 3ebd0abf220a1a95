"""Carries out a record of the commit log: every step of it may be done twice, so any process can complete it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llmbatch.errors import StorageError
from llmbatch.io.sealed_json import START_OVER
from llmbatch.io.writing.claims import Claims
from llmbatch.io.writing.commit_log import CommitRecord, Names
from llmbatch.io.writing.destination import Destination
from llmbatch.io.writing.finished import Finished
from llmbatch.io.writing.formats import Arrow, Format, LineForm, Parquet
from llmbatch.io.writing.parts import Part
from llmbatch.io.writing.staging import Staging
from llmbatch.io.writing.work_files import ENDING, MANIFEST, WHOLE


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a job at a destination, or the removal of the work of one that starts over."""

    destination: Destination
    staging: Staging
    format: Format  # of the output's files
    parquet: Parquet
    forms: Mapping[str, LineForm]  # that a manifest may name, of a file whose lines are no rows
    claims: Claims

    def run(self, ending: CommitRecord) -> None:
        """Log the record, and do what it says."""
        ending.write(self.staging.work)
        self._do(ending)

    def resume(self) -> None:
        """Complete what was interrupted, if anything was. No work is left then.

        Raises `StorageError` if a part that waits for its name has changed since it was staged.
        """
        ending = CommitRecord.read(self.staging.work)
        if ending is None:
            return
        waiting = set(self.staging.work.names())
        parts = chain.from_iterable(ending.files.values())
        self.staging.check(part for part in parts if self.staging.file(part.name) in waiting)
        self._do(ending)

    def _do(self, ending: CommitRecord) -> None:
        work = self.staging.work
        self.claims.check(ending)
        if ending.replaced is not None:
            self.staging.clean(but=ENDING)
            Names(ending.replaced).write(work)
            work.remove(ENDING)
            return
        self._remove(ending)
        if ending.manifest is not None:
            self._name_parts(ending, ending.manifest)
            work.write(MANIFEST, Finished(self.destination).encoded(ending.manifest))
            work.move(MANIFEST, self.destination.folder, self.destination.manifest)
        CommitRecord().write(work)  # all is in place: what is left is to clean
        self.staging.clean()

    def _remove(self, ending: CommitRecord) -> None:
        """Remove the old files, but not one that has its new content already, or gets it in one move."""
        to, waiting = self.destination, set(self.staging.work.names())
        kept = {
            final
            for final, parts in ending.files.items()
            if to.file is not None or not waiting.issuperset(self.staging.file(part.name) for part in parts)
        }
        if ending.manifest is not None and "form" in ending.manifest:
            kept |= {to.errors, to.columns}
        for name in ending.removed:
            if name not in kept:
                to.folder.remove(name)

    def _name_parts(self, ending: CommitRecord, manifest: Mapping[str, Any]) -> None:
        """Give all parts their names that do not have them."""
        waiting, published = set(self.staging.work.names()), self.staging.names().published
        for part in manifest["parts"]:
            parts = ending.files[part["name"]]
            if part["name"] not in published.values() or self.staging.file(parts[0].name) in waiting:
                self._put(part["name"], parts, part["rows"], manifest.get("form"))

    def _put(self, final: str, parts: Sequence[Part], rows: int, form: Mapping[str, Any] | None) -> None:
        """Give a name to a staged file, or to one file made of all of them."""
        to, work, kind = self.destination, self.staging.work, self.format
        if form is not None:
            kind, errors = self.forms[form["name"]].files(to.suffix, form, self.parquet)
            for name, other in ((to.columns, Arrow()), (to.errors, errors)):
                self.staging.join(other, parts)
                work.move(WHOLE, to.folder, name)
        whole = self.staging.file(parts[0].name)
        if len(parts) > 1 or kind is not self.staging.format:
            whole, found = WHOLE, self.staging.join(kind, parts)
            if found != rows:
                raise StorageError(
                    f"the staged parts of {to.url} must hold {rows:,} rows, but hold {found:,}: {START_OVER}"
                )
        work.move(whole, to.folder, final)
