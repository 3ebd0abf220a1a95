"""Which engine lends rows to which: by predicted ends, in other places, and nothing is lost when one ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.operators.ray.in_flight import ROW
from llmbatch.operators.ray.lending.exchange import LEAST_SECONDS, LONGEST_SILENCE, RowExchange
from llmbatch.operators.ray.lending.loans import Beat, Loan, LoanAnswers, Orders
from llmbatch.preprocess.request_batch import BegunAnswers

pytest.importorskip("ray")
from llmbatch.operators.ray.lending.place import Place, computing_units

NOTHING = BegunAnswers(np.empty(0, np.int32), np.empty(0, np.int32), [])


class Actors:
    """Engines of some actors, each on a core of its own, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.exchange = RowExchange(lambda: self.now)

    def beat(
        self,
        actor: str,
        seconds: float | None = None,
        *,
        process: int = 1,
        place: str = "",
        node: str = "node",
        cores: int = 0,
        **told: Any,
    ) -> Orders:
        at = Place(node, frozenset([place or actor]), cores)
        return self.exchange.beat(Beat(actor, f"{actor}-{process}", at, seconds, **told))

    def idle(self, actor: str, **told: Any) -> Orders:
        return self.beat(actor, idle=True, **told)


@pytest.fixture
def actors() -> Actors:
    return Actors()


def loan(number: str, rows: int = 2) -> Loan:
    table = pa.table({"text": [f"row {i}" for i in range(rows)]})
    return Loan(number, np.zeros(rows, ROW), np.arange(rows, dtype=np.uint64), table, NOTHING)


def answers(number: str, *rows: int) -> LoanAnswers:
    schema = AnswerSchema().rows
    columns = [pa.nulls(len(rows), field.type) for field in schema]
    columns[0] = pa.array(rows, pa.int32())
    return LoanAnswers(number, pa.RecordBatch.from_arrays(columns, schema=schema))


def test_the_engine_that_would_end_last_lends_to_one_without_work(actors: Actors) -> None:
    actors.beat("soon", 20.0)
    actors.beat("late", 60.0)
    actors.idle("free")
    assert not actors.beat("soon", 20.0).lend
    assert actors.beat("late", 60.0).lend
    orders = actors.beat("late", 30.0, lent=(loan("a"),))
    assert not orders.lend
    assert orders.loans == {"a"}
    [borrowed] = actors.idle("free").borrowed
    assert borrowed.number == "a"
    assert actors.beat("free", 30.0).borrowed == ()
    assert actors.exchange.moved == 2


def test_who_shares_what_it_computes_on_lends_nothing(actors: Actors) -> None:
    actors.beat("late", 60.0, place="core")
    actors.idle("free", place="core")
    assert not actors.beat("late", 60.0, place="core").lend
    actors.idle("other")
    assert actors.beat("late", 60.0, place="core").lend


def test_places_of_two_nodes_are_apart() -> None:
    assert Place("a", frozenset({"core 0"})).is_apart(Place("b", frozenset({"core 0"})))
    assert Place("a", frozenset({"core 0"})).is_apart(Place("a", frozenset({"core 1"})))
    assert not Place("a", frozenset({"core 0", "core 1"})).is_apart(Place("a", frozenset({"core 1"})))


def units(**about: Any) -> frozenset[str]:
    """What an actor of one reserved core of two computes on."""
    given: dict[str, Any] = {"actor": "a", "reserved": 1.0, "promised": 2.0, "cores": range(2), "threads": "1"}
    return computing_units({}, **given | about)


def test_actors_that_reserve_cores_are_apart_without_being_pinned() -> None:
    assert not units() & units(actor="b")


@pytest.mark.parametrize("about", [{"reserved": 0.5}, {"promised": 3.0}, {"threads": "2"}, {"threads": ""}])
def test_cores_that_others_may_use_as_well_are_shared(about: dict[str, Any]) -> None:
    assert units(**about) == {"core 0", "core 1"}


def test_actors_with_devices_compute_there() -> None:
    assert computing_units({"GPU": ["3"]}, actor="a", reserved=1.0, promised=2.0, cores=[0], threads="1") == {"GPU 3"}


def test_who_ends_in_a_moment_or_does_not_know_when_is_not_asked(actors: Actors) -> None:
    actors.beat("soon", LEAST_SECONDS - 0.1)
    actors.beat("unknown", None)
    actors.idle("free")
    assert not actors.beat("soon", LEAST_SECONDS - 0.1).lend
    assert not actors.beat("unknown", None).lend


def test_who_declines_is_asked_again_later_only(actors: Actors) -> None:
    actors.beat("late", 60.0)
    actors.idle("free")
    assert actors.beat("late", 60.0).lend
    assert not actors.beat("late", 60.0, declines=True).lend
    actors.idle("free")
    assert not actors.beat("late", 60.0).lend
    actors.now = 10.0
    actors.idle("free")
    assert actors.beat("late", 50.0).lend


def test_nobody_lends_to_who_has_got_work_meanwhile(actors: Actors) -> None:
    actors.beat("late", 60.0)
    actors.idle("free")
    actors.beat("free", None)
    assert not actors.beat("late", 60.0).lend


def test_two_engines_without_work_are_given_rows_of_two_others(actors: Actors) -> None:
    actors.beat("a", 60.0)
    actors.beat("b", 50.0)
    actors.idle("c")
    actors.idle("d")
    assert actors.beat("a", 60.0).lend
    assert actors.beat("b", 50.0).lend
    actors.beat("a", 30.0, lent=(loan("1"),))
    actors.beat("b", 30.0, lent=(loan("2"),))
    assert [one.number for one in actors.idle("c").borrowed] == ["1"]
    assert [one.number for one in actors.idle("d").borrowed] == ["2"]


def lent(actors: Actors) -> None:
    """An engine has lent two rows, as loan "a"."""
    actors.beat("late", 60.0)
    actors.idle("free")
    actors.beat("late", 60.0)
    actors.beat("late", 30.0, lent=(loan("a"),))
    assert len(actors.idle("free").borrowed) == 1


def test_answers_go_back_to_who_lent_and_the_loan_ends_with_the_last(actors: Actors) -> None:
    lent(actors)
    actors.beat("free", 20.0, answered=(answers("a", 1),))
    orders = actors.beat("late", 20.0)
    assert [one.answers["row"].to_pylist() for one in orders.answered] == [[1]]
    assert orders.loans == {"a"}
    actors.idle("free", answered=(answers("a", 0),))
    orders = actors.beat("late", 20.0)
    assert [one.answers["row"].to_pylist() for one in orders.answered] == [[0]]
    assert orders.loans == frozenset()
    assert actors.beat("late", 20.0).answered == ()


@pytest.mark.parametrize("end", ["leaves", "is replaced", "is silent"])
def test_a_loan_is_its_lenders_again_when_its_holder_ends(actors: Actors, end: str) -> None:
    lent(actors)
    if end == "leaves":
        actors.beat("free", leaves=True)
    elif end == "is replaced":
        actors.beat("free", process=2)
    else:
        actors.now = LONGEST_SILENCE / 2
        actors.beat("late", 30.0)
        actors.now = LONGEST_SILENCE + 1
    assert actors.beat("late", 30.0).loans == frozenset()
    actors.beat("free", process=1, answered=(answers("a", 0, 1),))
    assert actors.beat("late", 30.0).answered == ()  # too late


@pytest.mark.parametrize("at_once", [False, True])
def test_answers_that_were_there_before_the_holder_ended_are_kept(actors: Actors, at_once: bool) -> None:
    lent(actors)
    actors.beat("free", answered=(answers("a", 1),), leaves=at_once)
    actors.beat("free", leaves=True)
    orders = actors.beat("late", 30.0)
    assert [one.answers["row"].to_pylist() for one in orders.answered] == [[1]]
    assert orders.loans == frozenset()


def test_answers_for_a_lender_that_has_ended_are_dropped(actors: Actors) -> None:
    lent(actors)
    actors.beat("late", 60.0, process=2)
    actors.beat("free", answered=(answers("a", 0, 1),))
    orders = actors.beat("late", 60.0, process=2)
    assert (orders.answered, orders.loans) == ((), frozenset())


def test_who_has_no_work_is_told_whether_others_have(actors: Actors) -> None:
    assert not actors.idle("free").others_work
    actors.beat("loading", None)
    assert actors.idle("free").others_work
    actors.idle("loading")
    assert not actors.idle("free").others_work


def test_a_new_exchange_knows_of_no_loan(actors: Actors) -> None:
    lent(actors)
    actors.exchange = RowExchange(lambda: actors.now)
    assert actors.beat("late", 30.0).loans == frozenset()


def test_where_no_move_pays_cores_without_work_are_lent_to_the_engine_that_would_end_last(actors: Actors) -> None:
    declined(actors, "soon", 20.0)
    declined(actors, "late", 60.0)
    assert actors.beat("late", 59.0, cores=1).cores == 2
    assert actors.beat("soon", 19.0, cores=1).cores == 0


@pytest.mark.parametrize("change", ["work", "leaves", "silent"])
def test_cores_are_lent_until_their_engine_has_work_or_is_gone(actors: Actors, change: str) -> None:
    declined(actors, "late", 60.0)
    assert actors.beat("late", 59.0, cores=1).cores == 2
    if change == "silent":
        actors.now = LONGEST_SILENCE + 1
    else:
        actors.beat("free", 5.0 if change == "work" else None, cores=2, leaves=change == "leaves")
    assert actors.beat("late", 58.0, cores=1).cores == 0


def test_cores_stay_lent_while_the_engine_that_has_them_is_asked_for_rows_again(actors: Actors) -> None:
    declined(actors, "late", 60.0)
    actors.now = 11.0
    actors.idle("free", cores=2)
    orders = actors.beat("late", 50.0, cores=1)
    assert orders.lend
    assert orders.cores == 2


@pytest.mark.parametrize("other", [{"node": "other", "cores": 1}, {"cores": 0}, {"place": "free", "cores": 1}])
def test_cores_are_not_lent_to_other_nodes_nor_to_who_cannot_take_them(actors: Actors, other: dict[str, Any]) -> None:
    declined(actors, "late", 60.0, **other)
    assert actors.beat("late", 59.0, **other).cores == 0


def test_an_engine_that_is_about_to_end_takes_no_cores(actors: Actors) -> None:
    declined(actors, "late", 60.0)
    actors.beat("late", 3.0, cores=1)
    actors.idle("free", cores=2)
    assert actors.beat("late", 3.0, cores=1).cores == 0


def declined(actors: Actors, actor: str, seconds: float, **place: Any) -> None:
    """Have an engine decline to lend rows to one without work, which has two cores."""
    given = {"cores": 1, **place}
    actors.beat(actor, seconds, **given)
    actors.idle("free", cores=2)
    actors.beat(actor, seconds, declines=True, **given)
    actors.idle("free", cores=2)
