"""The rows of a shard on their way through an engine, in one call of its actor.

The ledger tells a call what earlier calls of its shard have answered, and what unfinished answers had by then. The call
reports rows as they are answered, and every few seconds what others have so far, so that a dead actor loses little of
long answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.answers.schema import AnswerSchema, add_answers
from llmbatch.io.gather import pick
from llmbatch.operators.ray.in_flight import ROW, InFlightRows
from llmbatch.operators.ray.ledger import BEGUN, MOST_DEATHS, TOGETHER, ShardHistory, report_schema
from llmbatch.operators.ray.lending.loans import Loan
from llmbatch.operators.ray.rows_owner import RowsOwner
from llmbatch.operators.ray.sharding import occurrences
from llmbatch.preprocess.request_batch import BegunAnswers

_ROWS_AT_RISK = 256
_SECONDS_AT_RISK = 1.0
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Reports(Protocol):
    """The ledger, as a call sees it."""

    def begin(self, shard: int) -> ShardHistory:
        """Take note that a call begins to work on a shard."""
        ...

    def report(self, shard: int, call: int, answers: pa.RecordBatch, *, last: bool) -> None:
        """Keep rows of a shard that were answered in a call."""
        ...

    def keep_begun(self, shard: int, call: int, begun: pa.RecordBatch) -> None:
        """Keep what the unfinished answers of a shard have so far (`ledger.BEGUN`), in place of what was there."""
        ...


class ShardCall(RowsOwner):
    """The rows of a shard on their way through an engine."""

    def __init__(
        self,
        shard: int,
        table: pa.Table,
        hashes: NDArray[np.uint64],
        known: ShardHistory,
        flight: InFlightRows,
        schema: AnswerSchema,
    ) -> None:
        """Take a call's table; `hashes` uint64 [rows] are those of its prompts, `schema` is that of its answers."""
        self._shard, self._number, self._flight = shard, known.call, flight
        self._schema = schema
        self.table = table
        self._rows = np.zeros(table.num_rows, ROW)
        self._rows["shard"], self._rows["row"], self._rows["occurrence"] = shard, hashes, occurrences(hashes)
        self._slots = np.full(table.num_rows, -1, np.int64)  # in the flight
        self._deaths = np.zeros(table.num_rows, np.int32)
        for (row, occurrence), deaths in known.deaths.items():
            self._deaths[(hashes == row) & (self._rows["occurrence"] == occurrence)] = deaths
        recalled = _recall(known.answers, hashes, schema)
        self._batches = recalled.to_batches()
        self._todo = np.ones(table.num_rows, np.bool_)
        self._todo[recalled["row"].to_numpy()] = False
        self._recalled = _recall_begun(known.begun, hashes)
        self._begun: pa.RecordBatch | None = None  # of `BEGUN`, to be told to the ledger
        self._changed = threading.Condition()
        self._fresh: list[pa.RecordBatch] = []
        self._error: BaseException | None = None

    @property
    def keys(self) -> NDArray[np.uint64]:
        """What tells each row from all others of the job: draws without a seed depend on it."""
        rows = self._rows
        keys: NDArray[np.uint64] = rows["row"] ^ (rows["shard"] + rows["occurrence"].astype(np.uint64) * _ODD)
        return keys

    def parts(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Return parts of rows that are to run beside each other, and in how many deaths each was involved."""
        for deaths in range(MOST_DEATHS + 1):
            rows = np.flatnonzero(self._todo & (np.minimum(self._deaths, MOST_DEATHS) == deaths))
            most = TOGETHER[deaths - 1] if 0 < deaths < MOST_DEATHS else max(1, len(rows))
            for start in range(0, len(rows), most):
                yield rows[start : start + most], deaths

    def begun_of(self, rows: NDArray[np.int64]) -> BegunAnswers:
        """Return what an earlier call had of the answers of some rows, which are sorted; rows are numbered by these."""
        found = self._recalled
        there = np.flatnonzero(np.isin(found.rows, rows))
        places = np.searchsorted(rows, found.rows[there]).astype(np.int32)
        return BegunAnswers(places, found.asks[there], [found.tokens[i] for i in there.tolist()])

    def keep_begun(self, begun: Sequence[tuple[NDArray[np.int64], BegunAnswers]]) -> None:
        """Take what unfinished answers have so far, of some rows each. Rows that wait keep what they had."""
        now = [BegunAnswers(of[one.rows].astype(np.int32), one.asks, one.tokens) for of, one in begun]
        rows = np.concatenate([answers.rows for answers in now])
        recalled = self._recalled
        waits = np.flatnonzero((self._slots[recalled.rows] < 0) & ~np.isin(recalled.rows, rows))
        kept = [recalled.tokens[i] for i in waits.tolist()]
        now.append(BegunAnswers(recalled.rows[waits], recalled.asks[waits], kept))
        batches = [
            pa.RecordBatch.from_arrays(
                [
                    pa.array(self._rows["row"][answers.rows]),
                    pa.array(self._rows["occurrence"][answers.rows]),
                    pa.array(answers.asks),
                    answers.column,
                ],
                schema=BEGUN,
            )
            for answers in now
        ]
        with self._changed:
            self._begun = pa.concat_batches(batches)

    def lend(self, number: str, rows: NDArray[np.int64], begun: BegunAnswers, columns: list[str]) -> Loan:
        """Make a loan of rows, ascending, which are in flight here no more; what there is of them is kept."""
        slots = self._slots[rows]
        self._flight.leave(slots[slots >= 0])
        self._slots[rows] = -1
        recalled = self._recalled
        others = np.flatnonzero(~np.isin(recalled.rows, rows))
        self._recalled = BegunAnswers(
            np.concatenate((recalled.rows[others], rows[begun.rows].astype(np.int32))),
            np.concatenate((recalled.asks[others], begun.asks)),
            [*(recalled.tokens[i] for i in others.tolist()), *begun.tokens],
        )
        table = pick(self.table.select(columns).to_batches(), rows, self.table.select(columns).schema)
        return Loan(number, self._rows[rows], self.keys[rows], table, begun)

    def begun(self, rows: NDArray[np.int64]) -> None:
        """Take note of rows that are given to the engine, some of them perhaps once more."""
        fresh = rows[self._slots[rows] < 0]
        self._slots[fresh] = self._flight.enter(self._rows[fresh])

    def answered(self, rows: NDArray[np.int64], answers: pa.RecordBatch) -> None:
        """Take the answers of rows; `answers` are of `AnswerSchema.rows`."""
        self._flight.end(self._slots[rows[self._slots[rows] >= 0]])
        columns, schema = answers.columns, answers.schema
        columns[0] = pa.array(rows.astype(np.int32))
        attempts = schema.get_field_index("attempts")
        columns[attempts] = pa.array(columns[attempts].to_numpy() + self._deaths[rows])
        with self._changed:
            self._fresh.append(pa.RecordBatch.from_arrays(columns, schema=schema))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Tell the call that the engine is no more."""
        with self._changed:
            self._error = error
            self._changed.notify()

    def finish(self, reports: Reports) -> pa.Table:
        """Report rows until none is left; the table with its answers. Raises what the engine failed of."""
        left = int(self._todo.sum())
        while left:
            fresh, begun = self._take(left)
            if begun is not None:
                reports.keep_begun(self._shard, self._number, begun)
            if fresh.num_rows == 0:
                continue
            left -= fresh.num_rows
            rows = fresh["row"].to_numpy()
            known = [pa.array(self._rows["row"][rows]), pa.array(self._rows["occurrence"][rows])]
            answers = pa.RecordBatch.from_arrays([*known, *fresh.columns[1:]], schema=report_schema(self._schema))
            reports.report(self._shard, self._number, answers, last=left == 0)
            self._flight.leave(self._slots[rows[self._slots[rows] >= 0]])
            self._batches.append(fresh)
        return add_answers(self.table, self._batches, self._schema)

    def _take(self, left: int) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Take the fresh answers, when there are some to report or a second has passed, and what has begun."""
        enough = min(left, _ROWS_AT_RISK)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or sum(batch.num_rows for batch in self._fresh) >= enough,
                _SECONDS_AT_RISK,
            )
            if self._error is not None:
                raise self._error
            fresh, self._fresh = self._fresh, []
            begun, self._begun = self._begun, None
        return pa.concat_batches(fresh) if fresh else pa.RecordBatch.from_pylist([], self._schema.rows), begun


def _recall(known: list[pa.RecordBatch], hashes: NDArray[np.uint64], schema: AnswerSchema) -> pa.Table:
    """Return what the ledger knows (`report_schema`) as answers of these rows (`AnswerSchema.rows`)."""
    answers = pa.Table.from_batches(known, schema=report_schema(schema))
    there, rows = _find(answers["row"].to_numpy(), answers["occurrence"].to_numpy(), hashes)
    rows, first = np.unique(rows, return_index=True)
    answers = pick(answers.select(schema.columns.names).to_batches(), there[first], schema.columns)
    return answers.add_column(0, schema.rows.field("row"), pa.array(rows.astype(np.int32)))


def _recall_begun(known: pa.RecordBatch | None, hashes: NDArray[np.uint64]) -> BegunAnswers:
    """Return what the ledger knows of unfinished answers (`BEGUN`) as those of these rows."""
    known = pa.RecordBatch.from_pylist([], schema=BEGUN) if known is None else known
    there, rows = _find(known["row"].to_numpy(), known["occurrence"].to_numpy(), hashes)
    return BegunAnswers.of_column(rows.astype(np.int32), known["ask"].to_numpy()[there], known["tokens"], there)


def _find(
    wanted: NDArray[np.uint64], before: NDArray[np.int32], hashes: NDArray[np.uint64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Find rows by their hashes, and how many equal ones come `before` each: which are there, and where."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    place = np.searchsorted(ordered, wanted) + before
    there = np.flatnonzero(place < len(hashes))
    there = there[ordered[place[there]] == wanted[there]]
    return there, order[place[there]]
