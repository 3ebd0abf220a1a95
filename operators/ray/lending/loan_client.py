"""The client of the exchange: what an engine has lent and borrowed, and the thread that tells, and does as told.

The engine's own thread never waits for the exchange: it looks at `wanted` between two steps, and leaves here what it
lends and answers. The thread tells that with its next beat, which is half a second away at most.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.operators.ray.in_flight import InFlightRows
from llmbatch.operators.ray.lending.borrowed import BorrowedRows
from llmbatch.operators.ray.lending.loans import Beat, Loan, LoanAnswers, LoanExchange, NoExchange, Orders
from llmbatch.operators.ray.lending.place import Place
from llmbatch.operators.ray.shard_call import ShardCall
from llmbatch.preprocess.request_batch import BegunAnswers

SECONDS: Final = 0.5  # between two beats
_LAST: Final = 5.0  # seconds that an engine which ends waits for its last beat


class RowsToLend(NamedTuple):
    """Rows of a call that are to go on elsewhere."""

    call: ShardCall
    rows: NDArray[np.int64]  # ascending
    begun: BegunAnswers  # what there is of their answers, by place among these rows


class LendingEngine(Protocol):
    """An engine, as the client of the exchange sees it."""

    def borrow(self, borrowed: BorrowedRows) -> None:
        """Run rows of another actor."""
        ...

    def take_back(self, call: ShardCall, rows: NDArray[np.int64], answers: pa.RecordBatch | None) -> None:
        """Take rows that were lent: their `answers`, or, where nobody answers them any more, to run them here."""
        ...

    def fail(self, error: BaseException) -> None:
        """Learn that nobody looks after its loans any more."""
        ...


@dataclass(slots=True)
class _Lent:
    """A loan that others answer."""

    call: ShardCall
    rows: NDArray[np.int64]  # of the call, by row of the loan
    missing: NDArray[np.bool_]  # [rows]
    told: bool = False  # whether the exchange knows of it


class LoanClient:
    """The loans of one engine. See the module's text."""

    def __init__(
        self,
        exchange: LoanExchange,
        flight: InFlightRows,
        columns: Sequence[str],
        *,
        actor: str,
        process: str,
        place: Place,
    ) -> None:
        """Lend `columns` of tables."""
        self._exchange, self._flight, self._columns = exchange, flight, list(columns)
        self._actor, self._process, self._place = actor, process, place
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._wanted = False
        self._cores = 0
        self._idle = self._alone = self._others_work = False
        self._seconds: float | None = None
        self._news = self._declines = self._leaves = False
        self._lent: dict[str, _Lent] = {}
        self._to_lend: list[Loan] = []
        self._to_answer: list[LoanAnswers] = []
        self._engine: LendingEngine | None = None
        self._thread = threading.Thread(target=self._run, name="loans", daemon=True)

    def open(self, engine: LendingEngine) -> None:
        """Begin to tell the exchange of an engine."""
        self._engine = engine
        self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether rows are to be lent."""
        return self._wanted

    @property
    def cores(self) -> int:
        """How many cores of others this engine may compute on."""
        return self._cores

    @property
    def can_lend(self) -> bool:
        """Whether a loan has anything in it: rows that need no column are all alike, and one request."""
        return len(self._columns) > 0

    def lend(self, parts: Sequence[RowsToLend]) -> None:
        """Lend rows, which are not in this engine any more; none: no move pays."""
        with self._changed:
            for part in parts:
                number = f"{self._process} {next(self._numbers)}"
                self._to_lend.append(part.call.lend(number, part.rows, part.begun, self._columns))
                self._lent[number] = _Lent(part.call, part.rows, np.ones(len(part.rows), np.bool_))
            self._declines = not parts
            self._wanted = False
            self._wake()
        if self._alone:
            self._take_back(frozenset())

    def answer(self, answers: LoanAnswers) -> None:
        """Send answers of rows that were borrowed, with the next beat."""
        with self._changed:
            self._to_answer.append(answers)

    def note(self, *, idle: bool, seconds: float | None) -> None:
        """Take note whether the engine is loaded with nothing to run, or when it will have ended, as predicted."""
        with self._changed:
            changed, self._idle, self._seconds = idle != self._idle, idle, seconds
            if changed:
                self._wake()

    def stay(self, unless: Callable[[], bool]) -> None:
        """Wait while this engine helps others or may yet help them, `unless` something holds; see `wake`.

        Ray Data ends actors that have no call where no shard is left, so who helps others stays in its last call.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._helps or self._alone or self._leaves or unless())

    def wake(self) -> None:
        """Look again at what is waited for."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """Tell the exchange that this engine ends; waits for a few seconds at most."""
        with self._changed:
            self._leaves = True
            self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LAST)

    def _wake(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _run(self) -> None:
        """Tell and obey, until this engine leaves or there is no exchange."""
        try:
            while not self._leaves:
                with self._changed:
                    self._changed.wait_for(lambda: self._news, SECONDS)
                    beat = self._beat()
                self._obey(self._exchange.beat(beat))
        except NoExchange:
            self._end()
            self._take_back(frozenset())
        except BaseException as error:  # raised in the threads that wait for answers
            self._end()
            self._lender.fail(error)

    def _end(self) -> None:
        """Lend and help no more."""
        with self._changed:
            self._alone, self._wanted, self._cores = True, False, 0
            self._changed.notify_all()

    @property
    def _helps(self) -> bool:
        """Whether rows of others are in this engine, or their answers still here, or others have rows to run."""
        return not self._idle or bool(self._to_answer) or self._others_work

    @property
    def _lender(self) -> LendingEngine:
        assert self._engine is not None, "the client is open"
        return self._engine

    def _beat(self) -> Beat:
        """Put together what is new."""
        lent, self._to_lend = tuple(self._to_lend), []
        answered, self._to_answer = tuple(self._to_answer), []
        declines, self._declines, self._news = self._declines, False, False
        for loan in lent:
            self._lent[loan.number].told = True
        return Beat(
            self._actor,
            self._process,
            self._place,
            self._seconds,
            idle=self._idle,
            lent=lent,
            declines=declines,
            answered=answered,
            leaves=self._leaves,
        )

    def _obey(self, orders: Orders) -> None:
        """Do what the exchange tells."""
        for one in orders.answered:
            lent = self._lent.get(one.number)
            if lent is not None:
                places = one.answers["row"].to_numpy()
                lent.missing[places] = False
                self._lender.take_back(lent.call, lent.rows[places], one.answers)
        if not self._leaves:
            self._take_back(orders.loans)
        for loan in orders.borrowed:
            self._lender.borrow(BorrowedRows(loan, self._flight, self.answer))
        with self._changed:
            self._wanted = orders.lend and not (self._to_lend or self._declines)
            self._others_work, self._cores = orders.others_work, orders.cores
            self._changed.notify_all()

    def _take_back(self, loans: frozenset[str]) -> None:
        """Run here what is not among the loans any more."""
        with self._changed:
            gone = [number for number, lent in self._lent.items() if (lent.told or self._alone) and number not in loans]
            over = [self._lent.pop(number) for number in gone]
        for lent in over:
            if lent.missing.any():
                self._lender.take_back(lent.call, lent.rows[lent.missing], None)
