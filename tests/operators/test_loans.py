"""Rows that one engine lends to another: each has one answer, that of an undisturbed run, whatever ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from llmbatch import JobError, LLMOperator
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.progress import Silence
from llmbatch.inference.worker import Worker
from llmbatch.io.row_hash import hash_rows
from llmbatch.operators.ray import actor
from llmbatch.operators.ray.actor import SharedEngine
from llmbatch.operators.ray.in_flight import InFlightRows, left_behind
from llmbatch.operators.ray.ledger import Ledger
from llmbatch.operators.ray.lending import loan_client
from llmbatch.operators.ray.lending.loan_client import LoanClient
from llmbatch.operators.ray.lending.loans import Beat, Loan, LoanAnswers, NoExchange, Orders
from llmbatch.operators.ray.shard_call import ShardCall
from llmbatch.planning.even_ends import RowsLeft
from llmbatch.runtime import active_run

pytest.importorskip("ray")
from llmbatch.operators.ray.lending.place import Place


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines tell each step how long the rest takes, and every second row moves: a small model gains nothing by it."""
    monkeypatch.setattr(loan_client, "SECONDS", 0.005)
    monkeypatch.setattr(actor, "_PREDICTED", 0.0)

    def half(left: RowsLeft, *_: object) -> Any:
        return left.rows[::2]

    monkeypatch.setattr(active_run, "rows_to_move", half)


class Lender:
    """The exchange as a lender sees it: it is to lend as soon as it has begun, once."""

    cores = 0

    def __init__(self) -> None:
        self.loan: Loan | None = None
        self.lent = threading.Event()
        self.answers: list[LoanAnswers] = []
        self.open = True
        self.gone = False

    def beat(self, beat: Beat) -> Orders:
        if beat.lent:
            [self.loan] = beat.lent
            self.lent.set()
        if self.gone:
            raise NoExchange
        answers, self.answers = tuple(self.answers), []
        loans = {self.loan.number} if self.loan is not None and self.open else ()
        asks = self.loan is None and beat.seconds is not None
        return Orders(asks, (), answers, frozenset(loans), cores=self.cores)


class Holder:
    """The exchange as somebody without work sees it."""

    def __init__(self, answered: Callable[[LoanAnswers], None]) -> None:
        self.loans: list[Loan] = []
        self.answered = answered

    def beat(self, beat: Beat) -> Orders:
        for one in beat.answered:
            self.answered(one)
        loans, self.loans = tuple(self.loans), []
        return Orders(borrowed=loans)


class Job:
    """A call that runs on an engine which lends."""

    def __init__(self, model: str, folder: Path, **options: Any) -> None:
        given: dict[str, Any] = {"model": model, "prompt": "text", "kv_memory": 2**24, "dtype": "float32"}
        self.op = cast(Any, LLMOperator(**given | {"max_tokens": 150, "ignore_eos": True} | options))
        self.table = pa.table({"text": [f"a prefix, then {i}" for i in range(12)], "id": range(12)})
        self.ledger = Ledger(str(folder / "ledger"), 12, Silence())
        self.flight = InFlightRows(folder / "flight")
        self.lender = Lender()
        self.engine = self.shared(self.lender, self.flight, "lender")
        self.found: list[pa.Table] = []
        self.error: list[BaseException] = []
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def shared(self, exchange: Any, flight: InFlightRows, name: str) -> SharedEngine:
        client = LoanClient(exchange, flight, ["text"], actor=name, process=name, place=Place("node", frozenset()))
        return SharedEngine(Worker.open(self.op.options), client)

    def _answer(self) -> None:
        hashes = hash_rows(self.table.select(["text"]))
        call = ShardCall(1, self.table, hashes, self.ledger.begin(1), self.flight, AnswerSchema())
        try:
            self.found.append(self.engine.answer(call, self.ledger))
        except BaseException as error:
            self.error.append(error)

    def loan(self) -> Loan:
        """What was lent."""
        assert self.lender.lent.wait(60)
        assert self.lender.loan is not None
        return self.lender.loan

    def check(self) -> None:
        """Each row has the answer of an undisturbed run, and the ledger has each once."""
        self.thread.join()
        self.engine.close()
        told = ["text", "id", "generated_text", "num_generated_tokens", "finish_reason", "error"]
        assert self.error == []
        assert self.found[0].select(told).equals(self.op(self.table).select(told))
        assert self.ledger.counts().answered == 12
        assert len(left_behind(self.flight._path)) == 0


@pytest.fixture
def jobs(model: str, tmp_path: Path) -> Callable[..., Job]:
    return lambda **options: Job(model, tmp_path, **options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 3}], ids=str)
def test_rows_that_are_lent_go_on_where_they_stand(jobs: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    job = jobs(**options)
    loan = job.loan()
    assert loan.table.column_names == ["text"]
    assert len(loan.known) == 6
    assert all(0 < len(tokens) < 150 for tokens in loan.begun.tokens)
    assert len(loan.begun.tokens) == 6
    holder = Holder(lambda answers: job.lender.answers.append(answers))
    flight = InFlightRows(tmp_path / "other")
    other = job.shared(holder, flight, "holder")
    holder.loans.append(loan)
    if "seed" in options or not options:
        job.check()
    else:  # draws without a seed depend on the job's keys, which the operator alone has otherwise
        job.thread.join()
        job.engine.close()
        assert job.found[0]["num_generated_tokens"].to_pylist() == [150] * 12
    other.close()
    assert len(left_behind(flight._path)) == 0


def test_rows_whose_holder_has_ended_are_run_by_who_lent_them(jobs: Any) -> None:
    job = jobs()
    job.loan()
    job.lender.open = False
    job.check()


def test_without_an_exchange_an_engine_runs_what_it_has_lent(jobs: Any) -> None:
    job = jobs()
    job.loan()
    job.lender.gone = True
    job.check()


def test_what_is_lent_is_not_in_flight_here_but_kept_for_the_next_call(jobs: Any) -> None:
    job = jobs()
    loan = job.loan()
    here = set(left_behind(job.flight._path)["row"].tolist())
    assert here.isdisjoint(loan.known["row"].tolist())
    job.lender.open = False
    job.check()


def test_a_row_that_fails_elsewhere_ends_the_job_of_who_lent_it(jobs: Any) -> None:
    job = jobs(on_error="raise")
    loan = job.loan()
    schema = AnswerSchema().rows
    row = {"row": 0, "error": "it broke", "error_kind": "engine", "num_input_tokens": 1, "num_generated_tokens": 0}
    row |= {"num_cached_tokens": 0, "finish_reason": "error", "attempts": 1}
    job.lender.answers.append(LoanAnswers(loan.number, pa.RecordBatch.from_pylist([row], schema=schema)))
    job.thread.join()
    job.engine.close()
    [error] = job.error
    assert isinstance(error, JobError)
    assert str(error) == (
        "a row failed (engine): it broke; on_error='column' keeps such rows, with their error, and goes on"
    )


def test_a_client_that_fails_ends_the_calls_of_its_engine(jobs: Any) -> None:
    job = jobs()
    loan = job.loan()
    broken = pa.RecordBatch.from_pylist([{"row": 99}], schema=AnswerSchema().rows)  # there is no such row
    job.lender.answers.append(LoanAnswers(loan.number, broken))
    job.thread.join()
    job.engine.close()
    assert isinstance(job.error[0], IndexError)


def test_rows_are_numbered_as_their_owner_has_them(jobs: Any) -> None:
    job = jobs()
    loan = job.loan()
    hashes = hash_rows(job.table.select(["text"]))
    places = [int(np.flatnonzero(hashes == row)[0]) for row in loan.known["row"]]
    assert loan.table["text"].to_pylist() == [job.table["text"][i].as_py() for i in places]
    job.lender.open = False
    job.check()


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_takes_cores_that_are_lent_to_it_while_there_is_an_exchange(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(actor, "borrow_threads", taken.append)
    monkeypatch.setattr(Lender, "cores", 1)
    job = jobs()
    job.loan()
    job.lender.open, job.lender.gone = False, gone
    job.check()
    assert 1 in taken
    assert taken[-1] == (0 if gone else 1)


def test_a_last_call_stays_while_others_have_work(tmp_path: Path) -> None:
    class Others:
        def __init__(self) -> None:
            self.work = True
            self.asked = threading.Event()

        def beat(self, beat: Beat) -> Orders:
            self.asked.set()
            return Orders(others_work=self.work)

    others = Others()
    flight, place = InFlightRows(tmp_path / "flight"), Place("node", frozenset())
    client = LoanClient(others, flight, ["text"], actor="a", process="a", place=place)
    client.open(cast(Any, None))
    client.note(idle=True, seconds=None)
    for _ in range(2):
        others.asked.clear()
        client.wake()
        assert others.asked.wait(60)
    client.stay(lambda: True)  # another call is there
    waiting = threading.Thread(target=client.stay, args=(lambda: False,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    others.work = False
    waiting.join()
    others.work = True
    client.close()
    client.stay(lambda: False)  # nobody stays at a client that is closed


def test_a_last_call_stays_while_rows_of_others_run_here(tmp_path: Path) -> None:
    told: list[LoanAnswers] = []
    exchange = Holder(told.append)
    flight, place = InFlightRows(tmp_path / "flight"), Place("node", frozenset())
    client = LoanClient(exchange, flight, ["text"], actor="a", process="a", place=place)
    client.note(idle=False, seconds=None)
    waiting = threading.Thread(target=client.stay, args=(lambda: False,))
    waiting.start()
    answers = LoanAnswers("1", cast(Any, None))
    client.answer(answers)
    client.note(idle=True, seconds=None)
    waiting.join(0.1)
    assert waiting.is_alive()  # their answers are still here
    client.open(cast(Any, None))
    waiting.join(60)
    assert not waiting.is_alive()
    assert told == [answers]
    client.close()
