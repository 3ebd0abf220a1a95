"""Where answered rows wait until they are in a part of the output.

In the input's order the rows of a window wait for its last one. In the order in which they finish, a part is written,
and seen by readers, as soon as there are enough rows for one; the keys of its rows are kept beside the work until the
job ends, because the part does not tell them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.answers import ROWS, Window, add_answers, add_columns
from llmbatch.outputs import PART_ROWS, Output
from llmbatch.picking import pick, split
from llmbatch.report import Tally

_NAME = re.compile(r"(\d+)-(journal|window)-(\d+)")
_KEYS = re.compile(r"(spool-\d+)\.keys")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of what a job keeps in its work folder. A new generation begins where the rows are laid out anew."""

    generation: int

    def journal(self, window: int) -> str:
        """The journal of a window."""
        return f"{self.generation:03d}-journal-{window:05d}"

    def part(self, window: int, part: int) -> str:
        """A staged part of a window."""
        return f"{self.generation:03d}-part-{window:05d}-{part:02d}"

    def whole(self, window: int) -> str:
        """What says that a window is whole."""
        return f"{self.generation:03d}-window-{window:05d}.json"

    def windows(self, names: Iterable[str]) -> tuple[set[int], set[int]]:
        """Of the windows that these names are of, those with a journal and those that are whole."""
        found = [match for match in map(_NAME.match, names) if match and int(match[1]) == self.generation]
        begun, whole = ({int(match[3]) for match in found if match[2] == kind} for kind in ("journal", "window"))
        return begun - whole, whole


@dataclass(frozen=True, slots=True)
class Whole:
    """A window whose rows are all in parts: those of its own, in order."""

    parts: list[str]
    rows: list[int]
    tally: Tally

    def encode(self) -> bytes:
        """As it is kept in the work folder."""
        return json.dumps({"parts": self.parts, "rows": self.rows, "tally": asdict(self.tally)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Whole:
        """What `encode` made."""
        kept = json.loads(data)
        return cls(kept["parts"], kept["rows"], Tally(**kept["tally"]))


class Shelf(Protocol):
    """Rows of windows on their way into parts."""

    def take(self, window: Window, rows: pa.RecordBatch) -> None:
        """Some rows of a window have their answers: a batch of ROWS."""
        ...

    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, Whole]:
        """All of them have; returns the windows that are whole now, by number."""
        ...

    def end(self) -> dict[int, Whole]:
        """All windows are closed; returns those that are whole only now."""
        ...

    def parts(self, whole: dict[int, Whole]) -> tuple[list[str], list[int]]:
        """After `end`: the names of all parts, and their rows."""
        ...


class InOrder:
    """Parts in the order of the input."""

    def __init__(self, output: Output, names: Names) -> None:
        self._output = output
        self._names = names

    def take(self, window: Window, rows: pa.RecordBatch) -> None:
        """Nothing: they wait for the others."""

    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, Whole]:
        """Stage the window's parts."""
        answered = add_answers(window.table, answers)
        parts, rows = [], []
        for number, first in enumerate(range(0, max(1, answered.num_rows), PART_ROWS)):
            parts.append(self._names.part(window.number, number))
            rows.append(self._output.stage(parts[-1], split(answered.slice(first, PART_ROWS))))
        return {window.number: Whole(parts, rows, Tally.of(answered, window))}

    def end(self) -> dict[int, Whole]:
        """Nothing: windows are whole when they are closed."""
        return {}

    def parts(self, whole: dict[int, Whole]) -> tuple[list[str], list[int]]:
        """The parts of all windows."""
        each = [whole[number] for number in sorted(whole)]
        return [part for one in each for part in one.parts], [rows for one in each for rows in one.rows]


class AsFinished:
    """Parts in the order in which rows finish, seen as soon as they are full."""

    def __init__(self, output: Output, part_rows: int) -> None:
        self._output = output
        self._most = min(part_rows, PART_ROWS)
        self._parts: list[str] = []
        self._rows: list[int] = []
        self._tables: list[pa.Table] = []
        self._keys: list[NDArray[np.uint64]] = []
        self._waiting = 0
        self._closed: dict[int, Whole] = {}
        kept = [np.empty(0, np.uint64)]
        for match in filter(None, map(_KEYS.fullmatch, output.work.names())):
            kept.append(np.frombuffer(output.work.read(match[0]) or b"", np.uint64))
            self._note(match[1], len(kept[-1]))
        self._published = np.sort(np.concatenate(kept))

    def take(self, window: Window, rows: pa.RecordBatch) -> None:
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

    def close(self, window: Window, answers: list[pa.RecordBatch]) -> dict[int, Whole]:
        """Windows are whole when nothing of them waits."""
        self._closed[window.number] = Whole([], [], Tally.of(pa.Table.from_batches(answers, schema=ROWS), window))
        return self._let_go()

    def end(self) -> dict[int, Whole]:
        """Write the last part."""
        if self._waiting or not self._parts:
            self._write(self._waiting)
        return self._let_go()

    def parts(self, whole: dict[int, Whole]) -> tuple[list[str], list[int]]:
        """The parts in the order in which they were written."""
        return self._parts, self._rows

    def _let_go(self) -> dict[int, Whole]:
        if self._waiting:
            return {}
        closed, self._closed = self._closed, {}
        return closed

    def _write(self, count: int) -> None:
        table, keys = pa.concat_tables(self._tables), np.concatenate(self._keys)
        name = f"spool-{len(self._parts):05d}"
        self._output.stage(name, split(table.slice(0, count)))
        self._output.work.write(f"{name}.keys", keys[:count].tobytes())  # from now on these rows are in the part
        self._note(name, count)
        self._tables, self._keys = [table.slice(count)], [keys[count:]]
        self._waiting -= count

    def _note(self, name: str, rows: int) -> None:
        self._output.publish(name, f"part-{len(self._parts):05d}.parquet")
        self._parts.append(name)
        self._rows.append(rows)
