"""The answers of a job's actors, kept with its driver, so that a death costs only the rows in flight.

Ray Data runs a call again from its beginning when its actor dies, and when the node that held its output is lost. So
actors report rows as they are answered, and ask for those of a shard before they run it. The answers lie on disk, a
journal a shard (`llmbatch.storage.journal`); memory holds counts, and the tokens of answers that are under way.

A row may kill the process that runs it, and then the next one. Nobody knows which row it was, so all rows in flight are
suspects, and the ledger counts in how many deaths each was involved: after each death a suspect is run among fewer
rows, at last alone. Processes die of other things too, and some of them while an innocent row is alone, so a row gets
an error after three deaths alone.

Each call has a number, and reports of a shard's earlier calls are rejected: an actor that was cut off with its node may
still be at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.answers.schema import AnswerSchema, errors_of, tokens_of
from llmbatch.inference.progress import Advance, Progress
from llmbatch.operators.ray.in_flight import RUNNING
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location

TOGETHER = (32, 8, 2, 1, 1, 1)  # suspects in flight together, after each death of one
MOST_DEATHS = len(TOGETHER) + 1


def report_schema(schema: AnswerSchema) -> pa.Schema:
    """Return the columns of answered rows as actors report them.

    A row of a shard is known by the hash of its prompt and how many equal ones come before it there.
    """
    return pa.schema([pa.field("row", pa.uint64()), pa.field("occurrence", pa.int32()), *schema.columns])


# Unfinished answers: rows are known as in reports, `ask` is which of its row's answers each is.
BEGUN: Final = pa.schema(
    {"row": pa.uint64(), "occurrence": pa.int32(), "ask": pa.int32(), "tokens": pa.large_list(pa.int32())}
)


@dataclass(frozen=True, slots=True)
class ShardHistory:
    """The ledger's answer to a call about its shard."""

    call: int
    answers: list[pa.RecordBatch]  # each of `report_schema`
    deaths: Mapping[tuple[int, int], int]  # by row and occurrence: in how many deaths it was involved
    begun: pa.RecordBatch | None = None  # of `BEGUN`: what unfinished answers have


@dataclass(frozen=True, slots=True)
class ActorHome:
    """The place of a process's file of rows in flight."""

    node: str
    file: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a job's events so far."""

    answered: int  # rows
    deaths: int  # of processes that ran rows
    lost: int  # rows that were in flight then


class Ledger:
    """Takes the answers of all actors of one job of `rows` rows. Lives in a process of its own, as a Ray actor."""

    def __init__(self, folder: str, rows: int, progress: Progress) -> None:
        """Continue with the contents of `folder`."""
        self._place = Location.at(folder)
        self._place.make()
        self._progress = progress
        self._journals: dict[int, Journal] = {}
        self._calls: dict[int, int] = {}
        self._deaths: dict[int, dict[tuple[int, int], int]] = {}
        self._begun: dict[int, pa.RecordBatch] = {}  # by shard
        self._died = self._lost = 0
        self._homes: dict[str, ActorHome] = {}
        self._total = rows
        self._rows = self._tokens = self._errors = 0
        for name in self._place.names():
            for record in self._journal(int(name, 16)).records():
                self._count(record)

    def settle(self, actor: str, home: ActorHome) -> ActorHome | None:
        """Register the process of an actor. Returns the home of its last process, which must have died."""
        before, self._homes[actor] = self._homes.get(actor), home
        return before

    def begin(self, shard: int) -> ShardHistory:
        """Register a call that works on a shard; reports of earlier calls are rejected from now on."""
        if not self._calls:
            self._progress.start(self._total)
        call = self._calls[shard] = self._calls.get(shard, 0) + 1
        answers = list(self._journal(shard).records())
        return ShardHistory(call, answers, self._deaths.get(shard, {}), self._begun.get(shard))

    def report(self, shard: int, call: int, answers: pa.RecordBatch, *, last: bool) -> None:
        """Record answered rows (`report_schema`) of a shard in a call; `last`: no row of it is left."""
        if self._calls.setdefault(shard, call) != call:
            return
        self._journal(shard).append(answers)
        if last:
            self._journal(shard).close()
            self._begun.pop(shard, None)
        self._count(answers)
        self._progress.advance(Advance(self._rows, self._tokens, self._errors))

    def keep_begun(self, shard: int, call: int, begun: pa.RecordBatch) -> None:
        """Keep what the unfinished answers of a shard have so far (`BEGUN`), in place of what was kept before."""
        if self._calls.get(shard) == call:
            self._begun[shard] = begun

    def died(self, rows: NDArray[np.void]) -> None:
        """Record that a process ended with these rows in flight (`llmbatch.operators.ray.in_flight.ROW`)."""
        self._died += 1
        self._lost += len(rows)
        for shard, row, occurrence, state in rows.tolist():
            if state == RUNNING:
                deaths = self._deaths.setdefault(shard, {})
                deaths[row, occurrence] = deaths.get((row, occurrence), 0) + 1

    def counts(self) -> Counts:
        """Return what happened so far."""
        return Counts(self._rows, self._died, self._lost)

    def homes(self) -> list[ActorHome]:
        """Return the home of the last process of each actor."""
        return list(self._homes.values())

    def _journal(self, shard: int) -> Journal:
        if shard not in self._journals:
            self._journals[shard] = Journal.open(self._place, f"{shard:016x}")
        return self._journals[shard]

    def _count(self, answers: pa.RecordBatch) -> None:
        self._rows += answers.num_rows
        self._tokens += sum(tokens_of(answers))
        self._errors += errors_of(answers)
