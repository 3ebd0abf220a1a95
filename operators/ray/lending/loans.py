"""Rows that one engine lends to another one, and what engines and the exchange tell each other of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.operators.ray.lending.place import Place
from llmbatch.preprocess.request_batch import BegunAnswers


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Rows of a shard that another engine answers for the call that they are of, which alone writes them."""

    number: str
    known: NDArray[np.void]  # [rows] of `in_flight.ROW`: what the ledger knows them by
    keys: NDArray[np.uint64]  # [rows] what draws without a seed depend on
    table: pa.Table  # the columns that the model reads
    begun: BegunAnswers  # what there is of their answers, by row of this table


@dataclass(frozen=True, slots=True, eq=False)
class LoanAnswers:
    """Answers of some rows of a loan."""

    number: str
    answers: pa.RecordBatch  # of `AnswerSchema.rows`, by row of the loan


@dataclass(frozen=True, slots=True, eq=False)
class Beat:
    """What an engine tells the exchange, twice a second, and at once where something changes."""

    actor: str
    process: str  # of the actor: another one has taken the place of those before
    place: Place
    seconds: float | None  # until all that it has will have ended, as predicted; None: nobody knows
    idle: bool = False  # it is loaded, and has nothing to run
    lent: tuple[Loan, ...] = ()  # since the last beat
    declines: bool = False  # it was to lend, and no move pays
    answered: tuple[LoanAnswers, ...] = ()  # of what it has borrowed, since the last beat
    leaves: bool = False  # it is about to end


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """What the exchange tells an engine."""

    lend: bool = False  # rows whose move pays
    borrowed: tuple[Loan, ...] = ()
    answered: tuple[LoanAnswers, ...] = ()  # of what it has lent
    loans: frozenset[str] = frozenset()  # what it has lent and somebody answers still; the rest is its own again
    others_work: bool = False  # some other engine has rows to run
    cores: int = 0  # of engines of its node without work, that it may compute on beside its own


class NoExchange(Exception):
    """There is no exchange any more: each engine runs alone."""


class LoanExchange(Protocol):
    """Who lends to whom, as an engine sees it."""

    def beat(self, beat: Beat) -> Orders:
        """Tell how an engine is; returns what it is to do. Raises `NoExchange`."""
        ...
