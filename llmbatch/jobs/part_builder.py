"""Where answered rows wait until they are in a part of the output.

In the input's order the rows of a window wait for its last one. In the order in which they finish, a part is written,
and seen by readers, as soon as there are enough rows for one; the keys of its rows are kept beside the work until the
job ends, because the part does not tell them.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.answers.schema import add_answers, add_columns
from llmbatch.inference.report import RowCounts
from llmbatch.inference.window import Window
from llmbatch.io.gather import pick, split
from llmbatch.io.sealed_json import START_OVER, damage, seal, unseal
from llmbatch.io.writing import work_files
from llmbatch.io.writing.output import PART_ROWS, Output
from llmbatch.io.writing.parts import Part, rows_of
from llmbatch.io.writing.work_files import WindowFiles
from llmbatch.storage.location import Location


@dataclass(frozen=True, slots=True)
class CompletedWindow:
    """A window whose rows are all in parts: those of its own, in order."""

    parts: list[Part]
    tally: RowCounts

    def write(self, work: Location, name: str) -> None:
        """Keep it in the work folder."""
        work.write(name, seal(name, {"parts": [part.encode() for part in self.parts], "tally": asdict(self.tally)}))

    @classmethod
    def read(cls, output: Output, names: WindowFiles, window: int, rows: int | None = None) -> CompletedWindow:
        """Read what `write` kept of a window, which has so many rows. A look at the parts' sizes is taken.

        Raises `DataError` where it is damaged, `StorageError` where one of its parts is.
        """
        name = names.whole(window)
        way_out = f"remove {output.work.shown(name)}, and its rows are answered again; or {START_OVER}"
        kept = unseal(output.work, name, way_out=way_out)
        try:
            if kept is None:
                raise ValueError
            whole = cls([Part.decode(part) for part in kept["parts"]], RowCounts(**kept["tally"]))
            if [part.name for part in whole.parts] != [names.part(window, i) for i in range(len(whole.parts))]:
                raise ValueError
            if rows is not None and {whole.tally.rows, rows_of(whole.parts) if whole.parts else rows} != {rows}:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise damage(output.work, name, way_out) from None
        for part in whole.parts:
            output.check_staged(part, way_out, content=False)
        return whole


class PartBuilder(ABC):
    """Puts answered rows into parts."""

    @abstractmethod
    def add(self, window: Window, rows: pa.RecordBatch) -> None:
        """Take answered rows: a batch of `AnswerSchema.rows`. All of a window are given once more to `close`."""

    @abstractmethod
    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, CompletedWindow]:
        """Take all answers of a window; return the windows that are whole now, by number."""

    @abstractmethod
    def finish(self) -> dict[int, CompletedWindow]:
        """Write what is left when all windows are closed; return those that are whole only now."""

    @abstractmethod
    def parts(self, whole: dict[int, CompletedWindow]) -> list[Part]:
        """List all parts after `finish`, in the order of their rows."""


class InputOrderParts(PartBuilder):
    """Parts in the order of the input."""

    def __init__(self, output: Output, names: WindowFiles) -> None:
        self._output = output
        self._names = names

    def add(self, window: Window, rows: pa.RecordBatch) -> None:
        """Leave the rows to `close`: a window is staged when all of it is answered."""

    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, CompletedWindow]:
        """Stage the window's parts."""
        answered = add_answers(window.table, answers, window.schema)
        parts = [
            self._output.stage(self._names.part(window.number, number), split(answered.slice(first, PART_ROWS)))
            for number, first in enumerate(range(0, max(1, answered.num_rows), PART_ROWS))
        ]
        return {window.number: CompletedWindow(parts, window.counts(answers))}

    def finish(self) -> dict[int, CompletedWindow]:
        """Return none: every window was whole when it was closed."""
        return {}

    def parts(self, whole: dict[int, CompletedWindow]) -> list[Part]:
        """List the parts of all windows."""
        return [part for number in sorted(whole) for part in whole[number].parts]


class CompletionOrderParts(PartBuilder):
    """Parts in the order in which rows finish, seen as soon as they are full."""

    def __init__(self, output: Output, part_rows: int, parts: list[Part], published: NDArray[np.uint64]) -> None:
        self._output = output
        self._most = min(part_rows, PART_ROWS)
        self._parts = parts
        self._published = published  # keys of the rows of these parts, sorted
        self._tables: list[pa.Table] = []
        self._keys: list[NDArray[np.uint64]] = []
        self._waiting = 0
        self._closed: dict[int, CompletedWindow] = {}

    @classmethod
    def open(cls, output: Output, part_rows: int) -> CompletionOrderParts:
        """Read the parts that earlier runs wrote, and publish those that are not yet. `part_rows` is a part's most.

        Raises `DataError` where the keys of a part's rows are damaged, `StorageError` where the part is.
        """
        parts: list[Part] = []
        published = [np.empty(0, np.uint64)]
        for name in work_files.spools(output.work.names()):
            part, keys = _read_part(output, name, number=len(parts))
            published.append(keys)
            _publish(output, parts, part)
        return cls(output, part_rows, parts, np.sort(np.concatenate(published)))

    def add(self, window: Window, rows: pa.RecordBatch) -> None:
        """Write a part if there are enough rows for one."""
        number = rows["row"].to_numpy()
        fresh = ~np.isin(window.keys[number], self._published)
        rows, number = rows.filter(pa.array(fresh)), number[fresh]
        table = pick(window.table.to_batches(), number, window.table.schema)
        self._tables.append(add_columns(table, rows))
        self._keys.append(window.keys[number])
        self._waiting += len(number)
        while self._waiting >= self._most:
            self._write(self._most)

    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, CompletedWindow]:
        """Note the window; return the closed ones if no row waits for its part any more."""
        self._closed[window.number] = CompletedWindow([], window.counts(answers))
        return self._let_go()

    def finish(self) -> dict[int, CompletedWindow]:
        """Write the last part."""
        if self._waiting or not self._parts:
            self._write(self._waiting)
        return self._let_go()

    def parts(self, whole: dict[int, CompletedWindow]) -> list[Part]:
        """List the parts in the order in which they were written."""
        return self._parts

    def _let_go(self) -> dict[int, CompletedWindow]:
        if self._waiting:
            return {}
        closed, self._closed = self._closed, {}
        return closed

    def _write(self, count: int) -> None:
        table, keys = pa.concat_tables(self._tables), np.concatenate(self._keys)
        name = work_files.spool(len(self._parts))
        part = self._output.stage(name, split(table.slice(0, count)))
        kept = {"part": part.encode(), "keys": base64.b64encode(keys[:count].tobytes()).decode()}
        file = work_files.keys(name)
        self._output.work.write(file, seal(file, kept))  # from now on these rows are in the part
        _publish(self._output, self._parts, part)
        self._tables, self._keys = [table.slice(count)], [keys[count:]]
        self._waiting -= count


def _read_part(output: Output, name: str, *, number: int) -> tuple[Part, NDArray[np.uint64]]:
    """Read part `number`, which an earlier run wrote under this name, and the keys of its rows."""
    file = work_files.keys(name)
    kept = unseal(output.work, file)
    try:
        if kept is None or name != work_files.spool(number):
            raise ValueError
        part, keys = Part.decode(kept["part"]), np.frombuffer(base64.b64decode(kept["keys"]), np.uint64)
        if part.name != name or part.rows != len(keys):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise damage(output.work, file) from None
    output.check_staged(part, content=False)
    return part, keys


def _publish(output: Output, parts: list[Part], part: Part) -> None:
    """Let readers see a part behind the others, and add it to them."""
    output.publish(part.name, f"part-{len(parts):05d}.parquet")
    parts.append(part)
