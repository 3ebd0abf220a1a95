"""The files below a folder, links followed: fsspec silently skips linked folders of a local disk."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import fsspec
from fsspec.utils import glob_translate

Infos = dict[str, dict[str, Any]]  # by path; of each at least "type" and "size"


def find(filesystem: fsspec.AbstractFileSystem, root: str, local: bool, wanted: Callable[[str], bool]) -> Infos:
    """Find the wanted files at any depth below a folder. A file that several links lead to is found once."""
    every = _walk(root, None) if local else filesystem.find(root, detail=True).items()
    files = ((path, info) for path, info in every if info["type"] != "directory" and wanted(path))
    return _once(files) if local else dict(files)


def glob(
    filesystem: fsspec.AbstractFileSystem, pattern: str, fixed: str, local: bool, wanted: Callable[[str], bool]
) -> Infos:
    """Find the wanted files and folders that match a pattern, which begins with the folder `fixed`."""
    if not local:
        return {path: info for path, info in filesystem.glob(pattern, detail=True).items() if wanted(path)}
    depth = None if "**" in pattern else pattern[len(fixed) :].strip("/").count("/") + 1
    matches = re.compile(glob_translate(pattern)).match
    root = fixed or "/"
    every = chain([(root, local_info(root))], _walk(root, depth)) if os.path.isdir(root) else iter(())
    slash = "/" if pattern.endswith("**") else ""  # as fsspec has it: "x/**" stands for x too
    return _once(
        (path, info) for path, info in every if wanted(path) and matches(path + slash * (info["type"] == "directory"))
    )


def local_info(path: str) -> dict[str, Any]:
    """Return the metadata of a file or folder, or of the target of a link."""
    status = os.stat(path)
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return {"name": path, "type": kind, "size": status.st_size, "mtime": status.st_mtime}


def _walk(
    root: str, depth: int | None, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield everything down to a depth, except the contents of a folder that a link leads back to."""
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
            info = {"name": path, "type": "file", "size": 0}  # a link to nothing: reading it raises
        yield path, info
        if info["type"] == "directory" and depth != 1:
            yield from _walk(path, None if depth is None else depth - 1, (*above, here))


def _once(entries: Iterable[tuple[str, dict[str, Any]]]) -> Infos:
    """Keep one of several paths to the same file: the one without links, or the first."""
    kept: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, info in entries:
        key = os.path.realpath(path) if info["type"] == "file" else path
        if key not in kept or path == key:
            kept[key] = (path, info)
    return dict(kept.values())
