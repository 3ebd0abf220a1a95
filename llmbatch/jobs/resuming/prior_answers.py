"""Answers of earlier runs, found by the key of their row.

They lie in journals and in parts, staged or finished. Only keys and hashes of all of them are in memory, sorted; the
answers of a window are read when it is its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import DataError
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.io.gather import pick
from llmbatch.io.row_hash import hash_rows

Reader = Callable[[Sequence[str]], Iterable[pa.Table]]  # the given columns, little by little


class Found(NamedTuple):
    """The contents of a source, one entry a row."""

    keys: NDArray[np.uint64]
    contents: NDArray[np.uint64]
    failed: NDArray[np.bool_]  # its answer is an error


class Source(Protocol):
    """Rows with their answers, left by an earlier run."""

    def found(self) -> Found:
        """Return the rows of these answers."""
        ...

    def answers(self, rows: NDArray[np.int64], columns: pa.Schema) -> pa.Table:
        """Read the answers' columns (`AnswerSchema.columns`) of some rows."""
        ...


class JournalSource:
    """The records of a journal."""

    def __init__(self, records: Iterable[pa.RecordBatch]) -> None:
        """Read all records, each of `journal_schema`."""
        self._records = list(records)

    def found(self) -> Found:
        """Return the rows of these answers."""
        none = np.empty(0, np.uint64)
        keys = np.concatenate([none, *(record["key"].to_numpy() for record in self._records)])
        contents = np.concatenate([none, *(record["content"].to_numpy() for record in self._records)])
        return Found(keys, contents, np.concatenate([np.empty(0, np.bool_), *map(_failed, self._records)]))

    def answers(self, rows: NDArray[np.int64], columns: pa.Schema) -> pa.Table:
        """Read the answers' columns of some rows."""
        return pick([record.select(columns.names) for record in self._records], rows, columns)


class PartSource:
    """A part of an output, whose rows also hold the input's columns."""

    def __init__(self, read: Reader, columns: Sequence[str], first: int, id_column: str | None) -> None:
        """Open a part; `columns` are the input's, and a part may lack some that came later.

        Without `id_column`, rows have their positions for keys, from `first` on.
        """
        self._read = read
        self._columns = columns
        self._first = first
        self._id = id_column

    def found(self) -> Found:
        """Return the rows of these answers."""
        first, pieces = self._first, []
        for table in self._read([*self._columns, "error"]):
            there = set(table.column_names)
            rows = table.select([name for name in self._columns if name in there])
            pieces.append(Found(keys_of(rows, first, self._id), hash_rows(rows), _failed(table)))
            first += table.num_rows
        return Found(*(np.concatenate(column) for column in zip(*pieces, strict=True)))

    def answers(self, rows: NDArray[np.int64], columns: pa.Schema) -> pa.Table:
        """Read the answers' columns of some rows."""
        order = np.argsort(rows, kind="stable")
        wanted, first, batches = rows[order], 0, []
        for table in self._read(columns.names):
            here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, first + table.num_rows)]
            batches += pick(table.cast(columns).to_batches(), here - first, columns).to_batches()
            first += table.num_rows
        return pick(batches, np.argsort(order), columns)


class PriorAnswers:
    """An index over sources; of two answers of a row the later source's counts."""

    def __init__(
        self,
        sources: Sequence[Source],
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        source: NDArray[np.int32],
        row: NDArray[np.int64],
    ) -> None:
        """Take the answered rows, one entry each: `keys`, sorted, and the `row` of a `source` with the answer."""
        self._sources = sources
        self._keys, self._contents = keys, contents
        self._source, self._row = source, row

    @classmethod
    def index(cls, sources: Sequence[Source], *, without_errors: bool) -> PriorAnswers:
        """Read which rows the sources answer; `without_errors` those that failed count as not answered."""
        all_found = [source.found() for source in sources]
        keys = np.concatenate([found.keys for found in all_found] or [np.empty(0, np.uint64)])
        contents = np.concatenate([found.contents for found in all_found] or [np.empty(0, np.uint64)])
        failed = np.concatenate([found.failed for found in all_found] or [np.empty(0, np.bool_)])
        counts = [len(found.keys) for found in all_found]
        source = np.repeat(np.arange(len(sources), dtype=np.int32), counts)
        row = np.concatenate([np.arange(count) for count in counts] or [np.empty(0, np.int64)])
        if without_errors:
            keys, contents, source, row = (column[~failed] for column in (keys, contents, source, row))
        order = np.argsort(keys, kind="stable")
        order = order[np.append(keys[order][1:] != keys[order][:-1], True)[: len(order)]]  # the last of equal keys
        return cls(sources, keys[order], contents[order], source[order], row[order])

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, keys: NDArray[np.uint64], contents: NDArray[np.uint64], first: int) -> None:
        """Raise DataError if an answered row has changed since. `first` is the number of the first."""
        at, there = self._places(keys)
        changed = np.flatnonzero(self._contents[at[there]] != contents[there])
        if len(changed):
            row = first + int(np.flatnonzero(there)[changed[0]])
            raise DataError(
                f"the input has changed since this job began: row {row} was answered when it read otherwise: "
                "restore it, have such rows answered again with changed_rows='answer' (--changed-rows answer), "
                "choose another output, or start over with restart=True (--restart)"
            )

    def lookup(self, keys: NDArray[np.uint64], contents: NDArray[np.uint64], schema: AnswerSchema) -> pa.Table:
        """Read the answers to those of a window's rows that have one and have not changed: as `AnswerSchema.rows`."""
        at, there = self._places(keys)
        there[there] = self._contents[at[there]] == contents[there]
        rows, at = np.flatnonzero(there).astype(np.int32), at[there]
        tables = [schema.rows.empty_table()]
        for number in np.unique(self._source[at]).tolist():
            mine = self._source[at] == number
            answers = self._sources[number].answers(self._row[at[mine]], schema.columns)
            tables.append(answers.add_column(0, schema.rows.field("row"), pa.array(rows[mine])).cast(schema.rows))
        return pa.concat_tables(tables)

    def _places(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        at = np.searchsorted(self._keys, keys)
        there = at < len(self._keys)
        there[there] = self._keys[at[there]] == keys[there]
        return at, there


def journal_schema(schema: AnswerSchema) -> pa.Schema:
    """Return the columns of a journal's records: the row's key, a hash of its values, and its answer."""
    return pa.schema([pa.field("key", pa.uint64()), pa.field("content", pa.uint64()), *schema.columns])


def keys_of(table: pa.Table, first: int, id_column: str | None) -> NDArray[np.uint64]:
    """Compute the keys of a job's rows: a hash of `id_column`, or their positions, from `first` on."""
    if id_column is None:
        return np.arange(first, first + table.num_rows, dtype=np.uint64)
    return hash_rows(table.select([id_column]))


def _failed(table: pa.Table | pa.RecordBatch) -> NDArray[np.bool_]:
    failed: NDArray[np.bool_] = np.asarray(table["error"].is_valid())
    return failed
