"""The Parquet files that a simulation leaves its steps and requests in: checked before it runs, written whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.arguments import path, refusal
from llmbatch.storage.location import Location

NAMES = ("steps_out", "requests_out")  # the options that name them


@dataclass(frozen=True, slots=True)
class TableFiles:
    """Where tables are to be written, by the options that named the files."""

    files: Mapping[str, Path]

    @classmethod
    def take(cls, options: dict[str, Any], inputs: Iterable[str]) -> TableFiles:
        """Take the files out of the options of a simulation that reads `inputs`.

        Raises `ParameterError` for one that cannot be written, is an input, or is named twice.
        """
        given = {name: options.pop(name, None) for name in NAMES}
        files = {name: _writable(name, value) for name, value in given.items() if value is not None}
        read = {os.path.realpath(os.path.expanduser(each)) for each in inputs}
        for name, file in files.items():
            if os.path.realpath(file) in read:
                raise refusal(name, "be none of the traces, which it would replace", str(file))
        if len({os.path.realpath(file) for file in files.values()}) < len(files):
            raise refusal("requests_out", "be another file than steps_out", str(files["requests_out"]))
        return cls(files)

    def write(self, tables: Mapping[str, Callable[[], pa.Table]]) -> None:
        """Write the tables that were asked for, by the names of their options. Raises `StorageError`."""
        for name, file in self.files.items():
            with Location.at(str(file.parent)).writing(file.name) as stream:
                pq.write_table(tables[name](), stream)


def _writable(name: str, value: object) -> Path:
    given = path(name, value)
    file = Path(given).expanduser().absolute()
    if not given or (file.exists() and not file.is_file()):
        raise refusal(name, "name a file", value)
    if not file.parent.is_dir():
        raise refusal(name, "lie in a folder that is there (create it first)", value)
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise refusal(name, "lie in a folder that can be written", value)
    return file
