"""Names of the files in an output's work folder, where a job keeps what is not finished.

All of them are named here, because the folder goes when the job ends: what has no such name was written by no job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from llmbatch.storage.lock import is_lock

JOB: Final = "job.json"  # which job it is whose work lies there
NAMES: Final = "names.json"  # the files that were there before, and those that have their names already
ENDING: Final = "ending.json"  # how the job ends, logged before it does
MANIFEST: Final = "manifest.json"  # until it is moved to its place
BEGUN: Final = "begun.arrow"  # tokens of answers under way
WHOLE: Final = "whole.staged"  # one file made of all parts

_OF_WINDOW = re.compile(r"(\d{3,})-(journal|window)-(\d{5,})(-\d{6,}|\.json)?")  # a journal on a store has segments
_KEYS = re.compile(r"(spool-\d{5,})\.keys")
_STAGED = re.compile(r".+\.staged")


@dataclass(frozen=True, slots=True)
class WindowFiles:
    """Names of what a job keeps of its windows. A new generation begins where the rows are laid out anew."""

    generation: int

    def journal(self, window: int) -> str:
        """Name the journal of a window."""
        return f"{self.generation:03d}-journal-{window:05d}"

    def part(self, window: int, part: int) -> str:
        """Name a staged part of a window."""
        return f"{self.generation:03d}-part-{window:05d}-{part:02d}"

    def whole(self, window: int) -> str:
        """Name what says that a window is whole."""
        return f"{self.generation:03d}-window-{window:05d}.json"

    def windows(self, names: Iterable[str]) -> tuple[set[int], set[int]]:
        """Find the windows that these names are of: those with only a journal, and those that are whole."""
        found = [match for match in map(_OF_WINDOW.fullmatch, names) if match and int(match[1]) == self.generation]
        begun, whole = ({int(match[3]) for match in found if match[2] == kind} for kind in ("journal", "window"))
        return begun - whole, whole


def staged(part: str, suffix: str) -> str:
    """Name the file of a staged part, which readers of a folder do not take for one of the output."""
    return f"{part}{suffix}.staged"


def spool(number: int) -> str:
    """Name a part of rows in the order in which they finish."""
    return f"spool-{number:05d}"


def keys(spool: str) -> str:
    """Name what holds the keys of such a part's rows."""
    return f"{spool}.keys"


def spools(names: Iterable[str]) -> list[str]:
    """Find the parts whose keys are among these names."""
    return [match[1] for match in map(_KEYS.fullmatch, names) if match]


def is_of_a_job(name: str) -> bool:
    """Tell whether a job may have given this name."""
    if name in (JOB, NAMES, ENDING, MANIFEST, BEGUN) or is_lock(name):
        return True
    return any(known.fullmatch(name) for known in (_OF_WINDOW, _KEYS, _STAGED))
