"""What lies below a folder, links followed: fsspec passes over linked folders of a local disk without a word."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from itertools import chain
from typing import Any

import fsspec
from fsspec.utils import glob_translate

Infos = dict[str, dict[str, Any]]  # by path; of each at least "type" and "size"


def find(filesystem: fsspec.AbstractFileSystem, root: str, local: bool) -> Infos:
    """All files at any depth below a folder. One that several links lead to is there once."""
    if not local:
        found: Infos = filesystem.find(root, detail=True)
        return found
    return {path: info for path, info in _once(_walk(root, None)) if info["type"] == "file"}


def glob(filesystem: fsspec.AbstractFileSystem, pattern: str, fixed: str, local: bool) -> Infos:
    """All files and folders that match a pattern, which begins with the folder `fixed`."""
    if not local:
        found: Infos = filesystem.glob(pattern, detail=True)
        return found
    depth = None if "**" in pattern else pattern[len(fixed) :].strip("/").count("/") + 1
    matches = re.compile(glob_translate(pattern)).match
    root = fixed or "/"
    every = chain([(root, local_info(root))], _walk(root, depth)) if os.path.isdir(root) else iter(())
    slash = "/" if pattern.endswith("**") else ""  # as fsspec has it: "x/**" stands for x too
    return {path: info for path, info in _once(every) if matches(path + slash * (info["type"] == "directory"))}


def local_info(path: str) -> dict[str, Any]:
    """What the disk says of a file or folder, or of what a link to it leads to."""
    status = os.stat(path)
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return {"name": path, "type": kind, "size": status.st_size, "mtime": status.st_mtime}


def _walk(
    root: str, depth: int | None, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything down to a depth, but for what lies in a folder that a link leads back to."""
    status = os.stat(root)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = os.path.join(root, name)
        try:
            info = local_info(path)
        except OSError:
            if not os.path.islink(path):
                continue  # it has just gone
            info = {"name": path, "type": "file", "size": 0}  # a link to nothing: whoever reads it will say so
        yield path, info
        if info["type"] == "directory" and depth != 1:
            yield from _walk(path, None if depth is None else depth - 1, (*above, here))


def _once(entries: Iterator[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The entries, but of files that several paths lead to only one: the one without links, or the first."""
    kept: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, info in entries:
        key = os.path.realpath(path) if info["type"] == "file" else path
        if key not in kept or path == key:
            kept[key] = (path, info)
    return list(kept.values())
