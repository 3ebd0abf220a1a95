"""Which engine of a job lends rows to which, so that all end together.

An engine without work is matched with the one that would end last of all in other places, by the seconds that each
predicts for itself. Which rows move, if that pays, is decided where they are (`llmbatch.planning.even_ends`). Rows
travel by the exchange, and so do their answers, back to the call that they are of.

Nothing is kept on disk, for nothing is lost without it: engines go by what they are told with each beat. A loan that
the exchange does not name any more, because who had it has ended, was silent for too long, or the exchange itself
began anew, is run again by who lent it. What others answer of it then comes too late, and is dropped.

Where no move pays, an engine without work lends its cores to the one of its node that would end last, until it has
work or leaves. A few rows, or the last one, cannot be shared otherwise. For half a second both may compute on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from llmbatch.operators.ray.lending.loans import Beat, Loan, LoanAnswers, Orders
from llmbatch.operators.ray.lending.place import Place

LONGEST_SILENCE: Final = 30.0  # seconds, after which an engine counts as dead
LEAST_SECONDS: Final = 4.0  # that an engine has left when it is asked: to ask, to send and to come back takes some two
_AGAIN: Final = 10.0  # seconds, until one that declined is asked again


@dataclass(slots=True)
class _Engine:
    """What is known of a process with an engine, and what it is to be told."""

    actor: str
    place: Place
    seconds: float | None = None
    idle: bool = False
    heard: float = 0.0  # when
    asked_for: str | None = None  # the process that it is to lend to
    cores_for: str | None = None  # the process that may compute on its cores
    ask_after: float = 0.0
    borrowed: list[Loan] = field(default_factory=list)  # to be told
    answered: list[LoanAnswers] = field(default_factory=list)  # to be told


@dataclass(slots=True)
class _OpenLoan:
    """A loan with rows that are not answered, or whose answers the lender was not told."""

    lender: str
    holder: str
    left: int  # rows


class RowExchange:
    """Takes the beats of all engines of one job. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}  # by process
        self._loans: dict[str, _OpenLoan] = {}
        self._moved = 0

    @property
    def moved(self) -> int:
        """How many rows were lent so far."""
        return self._moved

    def beat(self, beat: Beat) -> Orders:
        """Take note of how an engine is; returns what it is to do (`lending.loans.LoanExchange`)."""
        now = self._clock()
        self._forget_the_dead(beat, now)
        engine = self._engines.setdefault(beat.process, _Engine(beat.actor, beat.place))
        engine.seconds, engine.idle, engine.heard = beat.seconds, beat.idle, now
        if not engine.idle:
            engine.cores_for = None
        self._take(engine, beat, now)
        if beat.leaves:
            self._forget(beat.process)
            return Orders()
        self._match(now)
        return self._orders(beat.process, engine)

    def _forget_the_dead(self, beat: Beat, now: float) -> None:
        """Forget who was silent for too long, and the processes of an actor before this one."""
        for process, engine in list(self._engines.items()):
            replaced = engine.actor == beat.actor and process != beat.process
            if replaced or now - engine.heard > LONGEST_SILENCE:
                self._forget(process)

    def _forget(self, process: str) -> None:
        """Forget an engine and its loans."""
        self._engines.pop(process, None)
        self._loans = {
            number: loan for number, loan in self._loans.items() if process not in (loan.lender, loan.holder)
        }
        for engine in self._engines.values():
            engine.borrowed = [loan for loan in engine.borrowed if loan.number in self._loans]
            if engine.asked_for == process:
                engine.asked_for = None

    def _take(self, engine: _Engine, beat: Beat, now: float) -> None:
        """Pass on what an engine lends and answers."""
        for loan in beat.lent:
            holder = engine.asked_for
            if holder is not None and loan.number not in self._loans:
                self._loans[loan.number] = _OpenLoan(beat.process, holder, len(loan.known))
                self._engines[holder].borrowed.append(loan)
                self._moved += len(loan.known)
        if beat.lent or beat.declines:
            engine.asked_for = None
        if beat.declines:
            engine.ask_after = now + _AGAIN
        for answers in beat.answered:
            open_loan = self._loans.get(answers.number)
            if open_loan is not None and open_loan.holder == beat.process:
                self._engines[open_loan.lender].answered.append(answers)

    def _match(self, now: float) -> None:
        """Ask those that would end last to lend to those without work, or let them have the cores of these."""
        for process in list(self._engines):
            if not self._is_free(process):
                continue
            free = self._engines[process]
            late = [
                engine
                for engine in self._engines.values()
                if engine.seconds is not None
                and engine.seconds >= LEAST_SECONDS
                and engine.asked_for is None
                and now >= engine.ask_after
                and engine.place.is_apart(free.place)
            ]
            if late:
                max(late, key=lambda engine: engine.seconds or 0.0).asked_for = process
            else:
                free.cores_for = self._declined_last(free, now)

    def _declined_last(self, free: _Engine, now: float) -> str | None:
        """Find the process that would end last of those that have declined to lend, and can take cores of this one."""
        seconds = {
            process: engine.seconds
            for process, engine in self._engines.items()
            if engine.seconds is not None
            and engine.seconds >= LEAST_SECONDS
            and now < engine.ask_after
            and engine.place.takes_cores_of(free.place)
        }
        return max(seconds, key=seconds.__getitem__, default=None)

    def _is_free(self, process: str) -> bool:
        """Tell whether an engine has nothing to run, and will have nothing."""
        return (
            self._engines[process].idle
            and all(loan.holder != process for loan in self._loans.values())
            and all(engine.asked_for != process for engine in self._engines.values())
        )

    def _orders(self, process: str, engine: _Engine) -> Orders:
        """Tell an engine what is there for it."""
        if engine.asked_for is not None and not self._engines[engine.asked_for].idle:
            engine.asked_for = None
        borrowed, engine.borrowed = tuple(engine.borrowed), []
        answered, engine.answered = tuple(engine.answered), []
        for answers in answered:
            open_loan = self._loans.get(answers.number)
            if open_loan is not None:
                open_loan.left -= answers.answers.num_rows
                if open_loan.left == 0:
                    del self._loans[answers.number]
        loans = frozenset(number for number, loan in self._loans.items() if loan.lender == process)
        others_work = any(not other.idle for name, other in self._engines.items() if name != process)
        cores = sum(other.place.cores for other in self._engines.values() if other.cores_for == process)
        return Orders(engine.asked_for is not None, borrowed, answered, loans, others_work, cores)
