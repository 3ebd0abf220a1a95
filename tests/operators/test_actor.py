"""One engine that several shards share, as it lives in an actor of Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from llmbatch import JobError, LLMOperator
from llmbatch.inference.answers.assembler import AnswerSink, FlushPolicy
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.options import Options
from llmbatch.inference.progress import Silence
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.io.row_hash import hash_rows
from llmbatch.operators.ray.actor import SharedEngine
from llmbatch.operators.ray.in_flight import ENDED, ROW, RUNNING, InFlightRows, left_behind
from llmbatch.operators.ray.ledger import Ledger, ShardHistory
from llmbatch.operators.ray.shard_call import ShardCall
from llmbatch.operators.ray.shard_queue import ShardQueue
from llmbatch.runtime.protocols import Stop


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "ledger"), 0, Silence())


@pytest.fixture
def flight(tmp_path: Path) -> InFlightRows:
    return InFlightRows(tmp_path / "flight")


def simulated(model: str, **options: Any) -> Worker:
    return Worker.open(Options.build(model=model, prompt="text", engine="simulated", kv_memory=2**26, **options))


def table_of(texts: Iterable[str | None]) -> pa.Table:
    return pa.table({"text": pa.array(texts, pa.string())})


def called(shard: int, table: pa.Table, ledger: Ledger, flight: InFlightRows) -> ShardCall:
    return ShardCall(shard, table, hash_rows(table.select(["text"])), ledger.begin(shard), flight, AnswerSchema())


def died(ledger: Ledger, shard: int, table: pa.Table, *, times: int) -> None:
    """These rows, all different, ran when a process died."""
    rows = [(shard, row, 0, RUNNING) for row in hash_rows(table.select(["text"])).tolist()]
    for _ in range(times):
        ledger.died(np.array(rows, ROW))


def in_threads(calls: Iterable[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_shards_are_answered_as_the_operator_answers_them(model: str, ledger: Ledger, flight: InFlightRows) -> None:
    operator = cast(Any, LLMOperator(model=model, prompt="text", max_tokens=4, kv_memory=2**24))
    engine = SharedEngine(Worker.open(operator.options))
    tables = [table_of([f"a prefix, then {i * k % 11}" for i in range(30)] + [None]) for k in (1, 3, 7)]
    answered: dict[int, pa.Table] = {}

    def answer(shard: int) -> None:
        answered[shard] = engine.answer(called(shard, tables[shard], ledger, flight), ledger)

    in_threads(lambda k=k: answer(k) for k in range(3))
    engine.close()
    told = ["text", "generated_text", "num_input_tokens", "num_generated_tokens", "finish_reason", "error_kind"]
    for shard, table in enumerate(tables):
        assert answered[shard].column_names == ["text", *AnswerSchema().columns.names]
        assert answered[shard].select(told).equals(operator(table).select(told))
    assert ledger.counts().answered == 93


class Joined(AnswerSink):
    """A sink that notes after how many steps windows joined."""

    def __init__(self) -> None:
        self.steps = 0
        self.at: list[int] = []

    def joined(self, window: Window) -> None:
        self.at.append(self.steps)

    def write(self, window: Window, rows: pa.RecordBatch) -> None: ...

    def after_step(self) -> None:
        self.steps += 1


def window_of(worker: Worker, number: int, table: pa.Table) -> Window:
    keys = np.arange(table.num_rows, dtype=np.uint64)
    return worker.window(table, number=number, keys=keys, contents=keys)


def test_the_next_shard_joins_before_the_last_one_has_drained(model: str) -> None:
    worker = simulated(model, max_tokens=400, output_tokens="tokens")
    feed, joined = ShardQueue(), Joined()
    for number, lengths in enumerate([[400, 1], [1, 1]]):
        table = table_of(["x", "y"]).append_column("tokens", pa.array(lengths))
        feed.put(window_of(worker, number, table), apart=False)
    assert feed.wait()
    worker.stream(feed, joined)
    assert joined.steps >= 400
    assert max(joined.at) < 10


def test_suspects_run_apart_and_each_group_in_a_stream_of_its_own(model: str) -> None:
    worker = simulated(model)
    feed = ShardQueue()
    windows = [window_of(worker, number, table_of(["x"])) for number in range(4)]
    feed.put(windows[0], apart=False)
    feed.put(windows[1], apart=False)
    assert feed.wait()
    assert feed.next(True) is windows[0]
    feed.put(windows[2], apart=True)
    feed.put(windows[3], apart=True)
    assert feed.next(False) is None  # what runs is to end first
    assert feed.next(True) is None
    assert feed.wait()
    assert feed.next(True) is windows[2]
    assert feed.next(False) is None
    assert feed.next(True) is None
    assert feed.wait()
    assert feed.next(True) is windows[3]
    assert feed.next(True) is None
    assert feed.wait()
    assert feed.next(True) is windows[1]
    feed.close()
    assert not feed.wait()


def test_rows_that_the_ledger_knows_are_not_run_again(model: str, ledger: Ledger, flight: InFlightRows) -> None:
    table = table_of(["a", "b", "a", "c", "a"])
    hashes = hash_rows(table)
    begun: list[int] = []

    class Watched(SharedEngine):
        def begun(self, window: Window, rows: NDArray[np.int32]) -> None:
            begun.append(len(rows))
            super().begun(window, rows)

    engine = Watched(simulated(model, temperature=1.0))
    first = engine.answer(called(1, table, ledger, flight), ledger)
    assert sum(begun) == 5
    assert engine.answer(called(1, table, ledger, flight), ledger).equals(first)
    assert sum(begun) == 5
    shuffled = table.take([4, 3, 0, 1, 2])
    again = engine.answer(
        ShardCall(1, shuffled, hashes[[4, 3, 0, 1, 2]], ledger.begin(1), flight, AnswerSchema()), ledger
    )
    assert sum(begun) == 5
    assert again["text"].equals(shuffled["text"])
    longer = pa.concat_tables([table, table_of(["a", "d"])])
    assert engine.answer(called(1, longer, ledger, flight), ledger).num_rows == 7
    assert sum(begun) == 7
    engine.close()


def test_equal_rows_are_drawn_with_keys_of_their_own(ledger: Ledger, flight: InFlightRows) -> None:
    table = table_of(["a", "b", "a", "a"])
    keys = [called(shard, table, ledger, flight).keys.tolist() for shard in (1, 2)]
    assert len({*keys[0], *keys[1]}) == 8
    assert called(1, table, ledger, flight).keys.tolist() == keys[0]


def test_suspects_are_run_fewer_at_a_time_then_alone_then_not_at_all(ledger: Ledger, flight: InFlightRows) -> None:
    table = table_of([str(i) for i in range(100)])
    died(ledger, 1, table.slice(0, 70), times=1)
    died(ledger, 1, table.slice(0, 10), times=1)
    died(ledger, 1, table.slice(0, 3), times=1)
    died(ledger, 1, table.slice(1, 2), times=2)
    died(ledger, 1, table.slice(2, 1), times=2)
    died(ledger, 2, table.slice(90), times=1)
    parts = [(rows.tolist(), deaths) for rows, deaths in called(1, table, ledger, flight).parts()]
    assert parts == [
        (list(range(70, 100)), 0),
        (list(range(10, 42)), 1),
        (list(range(42, 70)), 1),
        (list(range(3, 10)), 2),
        ([0], 3),
        ([1], 5),
        ([2], 7),
    ]


def test_a_row_alone_in_three_deaths_of_the_process_gets_an_error(
    model: str, ledger: Ledger, flight: InFlightRows
) -> None:
    table = table_of(["good", "deadly", "suspect"])
    died(ledger, 1, table.slice(1, 2), times=1)
    died(ledger, 1, table.slice(1, 1), times=6)
    engine = SharedEngine(simulated(model))
    answered = engine.answer(called(1, table, ledger, flight), ledger)
    engine.close()
    assert answered["finish_reason"].to_pylist() == ["length", "error", "length"]
    assert answered["error_kind"].to_pylist() == [None, "engine", None]
    assert answered["error"][1].as_py() == (
        "the process of the engine died 7 times while it ran this row, the last three times with no other row beside it"
    )
    assert answered["attempts"].to_pylist() == [1, 7, 2]
    assert answered["num_input_tokens"].to_pylist() == [4, 6, 7]


def test_rows_are_in_flight_from_their_first_step_until_the_ledger_has_them(
    model: str, ledger: Ledger, flight: InFlightRows, tmp_path: Path
) -> None:
    states: list[set[int]] = []

    class Spy:
        def begin(self, shard: int) -> ShardHistory:
            return ledger.begin(shard)

        def report(self, shard: int, call: int, answers: pa.RecordBatch, *, last: bool) -> None:
            states.append(set(left_behind(tmp_path / "flight")["state"].tolist()))
            ledger.report(shard, call, answers, last=last)

        def keep_begun(self, shard: int, call: int, begun: pa.RecordBatch) -> None:
            ledger.keep_begun(shard, call, begun)

    engine = SharedEngine(simulated(model))
    engine.answer(called(1, table_of(["a", "b", "c"]), ledger, flight), Spy())
    engine.close()
    assert states == [{ENDED}]
    assert len(left_behind(tmp_path / "flight")) == 0


def test_a_row_that_fails_ends_the_job_where_that_was_asked_for(
    model: str, ledger: Ledger, flight: InFlightRows
) -> None:
    engine = SharedEngine(simulated(model, on_error="raise"))
    expected = (
        r"^a row failed \(null_prompt\): prompt is null; "
        r"on_error='column' keeps such rows, with their error, and goes on$"
    )
    for shard, text in ((1, None), (2, "fine")):  # the engine is no more
        with pytest.raises(JobError, match=expected):
            engine.answer(called(shard, table_of([text]), ledger, flight), ledger)


def test_a_closed_engine_leaves_no_thread(model: str) -> None:
    def threads() -> int:  # of engines: what compiles beside a first job has a thread that outlives it
        return sum(thread.name == "engine" for thread in threading.enumerate())

    before = threads()
    engine = SharedEngine(simulated(model))
    assert threads() == before + 1
    engine.close()
    assert threads() == before
    with pytest.raises(Stop):
        engine.after_step()


def test_an_empty_shard_gets_the_columns(model: str, ledger: Ledger, flight: InFlightRows) -> None:
    engine = SharedEngine(simulated(model))
    assert engine.answer(called(1, table_of([]), ledger, flight), ledger).column_names == [
        "text",
        *AnswerSchema().columns.names,
    ]
    engine.close()


def test_answers_that_a_dead_actor_had_begun_go_on_in_the_next_call(
    model: str, ledger: Ledger, flight: InFlightRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbatch.operators.ray.actor.SECONDS_AT_RISK", 0.0)
    monkeypatch.setattr("llmbatch.operators.ray.actor._HELD", FlushPolicy(1, 0.0))
    given: dict[str, Any] = {"prompt": "text", "kv_memory": 2**24, "dtype": "float32"}
    given |= {"max_tokens": 40, "ignore_eos": True}
    worker = Worker.open(Options.build(model=model, temperature=1.0, **given))
    table = table_of([f"row {i % 5}" for i in range(12)])
    undisturbed, engine = Ledger(str(tmp_path / "undisturbed"), 0, Silence()), SharedEngine(worker)
    expected = engine.answer(called(1, table, undisturbed, flight), undisturbed)
    engine.close()

    class Dies(Exception):
        """The actor's death."""

    class Dying:
        kept = 0

        def begin(self, shard: int) -> ShardHistory:
            return ledger.begin(shard)

        def report(self, shard: int, call: int, answers: pa.RecordBatch, *, last: bool) -> None:
            raise AssertionError("no answer ends before the death")

        def keep_begun(self, shard: int, call: int, begun: pa.RecordBatch) -> None:
            ledger.keep_begun(shard, call, begun)
            self.kept = int(begun["tokens"].value_lengths().to_numpy().sum())
            raise Dies

    dying, engine = Dying(), SharedEngine(worker)
    with pytest.raises(Dies):
        engine.answer(called(1, table, ledger, flight), dying)
    engine.close()
    known = ledger.begin(1).begun
    assert known is not None
    assert dying.kept > 0
    engine = SharedEngine(worker)
    call = called(1, table, ledger, flight)
    assert sum(len(one) for one in call.begun_of(np.arange(12)).tokens) == dying.kept
    answered = engine.answer(call, ledger)
    engine.close()
    assert answered["generated_text"].equals(expected["generated_text"])
    assert ledger.begin(1).begun is None
