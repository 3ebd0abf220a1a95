"""The write-ahead log of an output: which names a commit removes, and which file gets which name.

No file system renames many files at once. So the end of a job is logged before anything is done, and the next process
can complete it: each of its steps may be done twice. The beginning of a job that starts over is logged likewise: the
earlier job's work is removed, and what it showed to readers stays until the new output is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmbatch.io.sealed_json import damage, is_plain, seal, unseal
from llmbatch.io.writing.parts import Part
from llmbatch.io.writing.work_files import ENDING, NAMES
from llmbatch.storage.location import Location


@dataclass(frozen=True, slots=True)
class Names:
    """Names of files in an output's folder while a job works."""

    replaced: Sequence[str] = ()  # there before the job began; they go when it ends
    published: Mapping[str, str] = field(default_factory=dict)  # names given before it ends, by staged part

    @classmethod
    def read(cls, work: Location) -> Names | None:
        """Read the names, or return None if none were written. Raises `DataError` if they are damaged."""
        kept = unseal(work, NAMES)
        if kept is None:
            return None
        try:
            names = cls(kept["replaced"], dict(kept["published"]))
            if not all(map(is_plain, [*names.replaced, *names.published, *names.published.values()])):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise damage(work, NAMES) from None
        return names

    def write(self, work: Location) -> None:
        """Write the names."""
        work.write(NAMES, seal(NAMES, {"replaced": list(self.replaced), "published": dict(self.published)}))


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """How a job ends, or how the work of a job that starts over is removed. An empty record changes nothing."""

    removed: Sequence[str] = ()  # names in the output's folder, unless a file has got that name since
    files: Mapping[str, Sequence[Part]] = field(default_factory=dict)  # names, and the staged parts each is made of
    manifest: Mapping[str, Any] | None = None
    replaced: Sequence[str] | None = None  # the job starts over: `Names.replaced` of the new one

    @classmethod
    def read(cls, work: Location) -> CommitRecord | None:
        """Read the record, or return None if none was written. Raises `DataError` if it is damaged."""
        kept = unseal(work, ENDING)
        if kept is None:
            return None
        try:
            files = {final: [Part.decode(part) for part in parts] for final, parts in kept["files"].items()}
            ending = cls(kept["removed"], files, kept["manifest"], kept["replaced"])
            if not all(map(is_plain, [*ending.removed, *files, *(ending.replaced or ())])):
                raise ValueError
            if ending.manifest is not None and [part["name"] for part in ending.manifest["parts"]] != list(files):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise damage(work, ENDING) from None
        return ending

    def write(self, work: Location) -> None:
        """Write the record, before anything is done."""
        files = {final: [part.encode() for part in parts] for final, parts in self.files.items()}
        content = {"removed": list(self.removed), "files": files, "manifest": self.manifest, "replaced": self.replaced}
        work.write(ENDING, seal(ENDING, content))
