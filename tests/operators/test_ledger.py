"""What the actors of a Ray job have answered, and what they had in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.progress import Advance, Silence
from llmbatch.operators.ray.in_flight import ENDED, ROW, RUNNING, InFlightRows, left_behind
from llmbatch.operators.ray.ledger import ActorHome, Counts, Ledger, ShardHistory, report_schema


class Recorder(Silence):
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.shown: list[Advance] = []

    def start(self, rows: int) -> None:
        self.totals.append(rows)

    def advance(self, done: Advance) -> None:
        self.shown.append(done)


def report(*rows: tuple[int, int], text: str = "yes") -> pa.RecordBatch:
    """Answers of 3 + 2 tokens of the rows (hash, occurrence)."""
    values = {"generated_text": text, "num_input_tokens": 3, "num_generated_tokens": 2, "attempts": 1}
    columns = [
        pa.array([row for row, _ in rows], pa.uint64()),
        pa.array([occurrence for _, occurrence in rows], pa.int32()),
        *(pa.array([values.get(field.name)] * len(rows), field.type) for field in AnswerSchema().columns),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=report_schema(AnswerSchema()))


def answers_of(known: ShardHistory) -> pa.Table:
    return pa.Table.from_batches(known.answers, schema=report_schema(AnswerSchema()))


def in_flight(*rows: tuple[int, int, int], state: int = RUNNING) -> NDArray[np.void]:
    return np.array([(*row, state) for row in rows], ROW)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path), 10, Silence())


def test_a_shard_begins_with_no_answers(ledger: Ledger) -> None:
    known = ledger.begin(7)
    assert known.answers == []
    assert known.deaths == {}


def test_the_next_call_is_told_what_the_last_one_answered(ledger: Ledger) -> None:
    call = ledger.begin(7).call
    ledger.report(7, call, report((1, 0), (1, 1)), last=False)
    ledger.report(7, call, report((2**64 - 1, 0)), last=True)
    answers = answers_of(ledger.begin(7))
    assert answers.select(["row", "occurrence"]).to_pylist() == [
        {"row": 1, "occurrence": 0},
        {"row": 1, "occurrence": 1},
        {"row": 2**64 - 1, "occurrence": 0},
    ]
    assert set(answers["generated_text"].to_pylist()) == {"yes"}
    assert ledger.begin(8).answers == []


def test_a_call_that_was_overtaken_reports_in_vain(ledger: Ledger) -> None:
    old = ledger.begin(7).call
    new = ledger.begin(7).call
    ledger.report(7, old, report((1, 0)), last=False)
    assert ledger.counts().answered == 0
    ledger.report(7, new, report((1, 0)), last=False)
    assert ledger.counts().answered == 1


def test_rows_are_suspects_as_often_as_they_ran_when_a_process_died(ledger: Ledger) -> None:
    ledger.died(in_flight((7, 1, 0), (7, 2, 0), (8, 1, 0)))
    ledger.died(np.concatenate([in_flight((7, 2, 0)), in_flight((7, 3, 0), state=ENDED)]))
    assert ledger.begin(7).deaths == {(1, 0): 1, (2, 0): 2}
    assert ledger.begin(8).deaths == {(1, 0): 1}
    assert ledger.counts() == Counts(answered=0, deaths=2, lost=5)


def test_a_new_process_of_an_actor_learns_where_the_last_one_was(ledger: Ledger) -> None:
    assert ledger.settle("a", ActorHome("here", "one")) is None
    assert ledger.settle("b", ActorHome("here", "two")) is None
    assert ledger.settle("a", ActorHome("there", "three")) == ActorHome("here", "one")


def test_a_ledger_that_died_goes_on_with_its_folder(ledger: Ledger, tmp_path: Path) -> None:
    call = ledger.begin(7).call
    ledger.report(7, call, report((1, 0)), last=True)
    again = Ledger(str(tmp_path), 10, Silence())
    again.report(7, call, report((2, 0)), last=False)
    assert again.counts().answered == 2
    assert answers_of(again.begin(7)).num_rows == 2


def test_progress_starts_with_the_first_shard_and_counts_rows_and_tokens(tmp_path: Path) -> None:
    shown = Recorder()
    ledger = Ledger(str(tmp_path), 10, shown)
    assert shown.totals == []
    ledger.begin(7)
    ledger.report(7, ledger.begin(7).call, report((1, 0), (2, 0)), last=False)
    assert shown.totals == [10]
    assert shown.shown == [Advance(2, 10)]


@given(st.data())
@settings(max_examples=50)
def test_what_is_in_flight_is_what_began_and_did_not_leave(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flight") / "rows"
    flight = InFlightRows(path)
    expected: dict[int, tuple[int, int, int, int]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, 3000))
        rows = in_flight(*[(number, i, i % 3) for i in range(count)])
        slots = flight.enter(rows)
        expected.update({slot: (number, i, i % 3, RUNNING) for i, slot in enumerate(slots.tolist())})
        ended = data.draw(st.integers(0, len(expected)))
        some = list(expected)[:ended]
        flight.end(np.array(some, np.int64))
        expected.update({slot: (*expected[slot][:3], ENDED) for slot in some})
        gone = some[: data.draw(st.integers(0, ended))]
        flight.leave(np.array(gone, np.int64))
        for slot in gone:
            del expected[slot]
    assert sorted(left_behind(path).tolist()) == sorted(expected.values())


def test_a_killed_process_leaves_its_rows_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from llmbatch.operators.ray.in_flight import ROW, InFlightRows\n"
        "flight = InFlightRows(Path(sys.argv[1]))\n"
        "slots = flight.enter(np.array([(1, 2, 3, 0), (4, 5, 6, 0), (7, 8, 9, 0)], ROW))\n"
        "flight.end(slots[1:])\n"
        "flight.leave(slots[2:])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "rows"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert sorted(left_behind(path).tolist()) == [(1, 2, 3, RUNNING), (4, 5, 6, ENDED)]
