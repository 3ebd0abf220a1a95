"""One engine that jobs and guests share: each is answered as if it had the engine to itself, and fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmbatch.engine.recorded import RecordedEngine
from llmbatch.errors import JobError
from llmbatch.inference.answers.assembler import AnswerSink
from llmbatch.inference.options import Options
from llmbatch.inference.sharing.shared_worker import SharedWorker
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.preprocess.request_batch import BegunAnswers
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.online.guests import Guest, GuestEnd
from llmbatch.runtime.protocols import Stop
from llmbatch.scheduler.output import FinishReason
from tests.inference.test_conversations import TEMPLATE, TURNS, folder_of
from tests.support.guests import Told, guest


def worker_of(model: str, **options: Any) -> Worker:
    given: dict[str, Any] = {"prompt": "text", "kv_memory": 2**24, "max_tokens": 9, "dtype": "float32"} | options
    return Worker.open(Options.build(model=model, **given))


def simulated(model: str, **options: Any) -> Worker:
    return worker_of(model, engine="simulated", **options)


def table_of(rows: int, *, prefix: str = "a prefix, then", tokens: int | None = None) -> pa.Table:
    table = pa.table({"text": [f"{prefix} {i * 7 % 11}" for i in range(rows)]})
    return table if tokens is None else table.append_column("n", pa.array([tokens] * rows))


@dataclass
class Rows(AnswerSink):
    """Keeps answers; `after_each` is called after every step, `on_write` before answers are kept."""

    texts: dict[int, str] = field(default_factory=dict)  # by row of the table
    on_write: Callable[[], None] = lambda: None
    after_each: Callable[[], None] = lambda: None
    joined_after: int | None = None  # rows of others
    others: Rows | None = None

    def joined(self, window: Window) -> None:
        self.joined_after = None if self.others is None else len(self.others.texts)

    def write(self, window: Window, rows: pa.RecordBatch) -> None:
        self.on_write()
        for row, text in zip(rows["row"].to_pylist(), rows["generated_text"].to_pylist(), strict=True):
            assert window.first + row not in self.texts, "a row is answered twice"
            self.texts[window.first + row] = text

    def after_step(self) -> None:
        self.after_each()


@dataclass
class Windows:
    """Parts of a table as windows."""

    worker: Worker
    table: pa.Table
    rows: int
    made: int = 0

    def next(self, wait: bool) -> Window | None:
        first = self.made * self.rows
        if first >= self.table.num_rows:
            return None
        part, number = self.table.slice(first, self.rows), self.made
        self.made += 1
        keys = np.arange(first, first + part.num_rows, dtype=np.uint64)
        return self.worker.window(part, keys=keys, contents=keys, number=number, first=first)


class Ended(Told):
    """A guest's listener that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def ended(self, end: GuestEnd) -> None:
        super().ended(end)
        self.over.set()

    def wait(self) -> GuestEnd:
        assert self.over.wait(300)
        assert self.end is not None
        return self.end


def asked(prompt: list[int], max_tokens: int = 5) -> tuple[Guest, Ended]:
    told = Ended()
    return guest(prompt, max_tokens, told)[0], told


@pytest.fixture
def shared(request: pytest.FixtureRequest, model: str) -> Iterator[SharedWorker]:
    """An engine in a thread of its own: that of the tiny model, or, where the test says so, a simulated one."""
    engine = SharedWorker(getattr(request, "param", worker_of)(model))
    yield engine
    engine.close()


def answered_alone(worker: Worker, table: pa.Table) -> dict[int, str]:
    return dict(enumerate(worker.answer(table).table["generated_text"].to_pylist()))


def in_threads(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Call all at once; what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            calls[i]()
        except BaseException as error:
            raised[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_jobs_at_once_have_the_answers_that_each_has_alone(shared: SharedWorker, model: str) -> None:
    tables = [table_of(30, prefix=prefix) for prefix in ("one", "two", "a third")]
    sinks = [Rows() for _ in tables]
    guests = [asked([40, 41, 42 + i]) for i in range(9)]
    for one, _ in guests:
        shared.submit(one)
    raised = in_threads(
        *(
            lambda table=table, sink=sink: shared.stream(Windows(shared.worker, table, 12), sink)
            for table, sink in zip(tables, sinks, strict=True)
        )
    )
    assert raised == [None] * 3
    for table, sink in zip(tables, sinks, strict=True):
        assert sink.texts == answered_alone(worker_of(model), table)
    for _, told in guests:
        assert told.wait().tokens.tolist() == told.tokens


def test_a_job_is_told_what_was_done_for_it(shared: SharedWorker) -> None:
    totals = shared.stream(Windows(shared.worker, table_of(20), 20), Rows())
    assert totals.ended == 11, "equal rows are one request"
    assert totals.steps > 0
    assert totals.reason
    assert totals.engine_deaths == 0


@pytest.mark.parametrize("shared", [simulated], indirect=True)
def test_a_job_that_comes_later_need_not_wait_until_all_rows_of_another_have_begun(shared: SharedWorker) -> None:
    long = shared.worker.asking(output_tokens="n", sampling=SamplingParams(max_tokens=100))
    first, second = Rows(), Rows()
    second.others = first
    begun = threading.Event()
    first.after_each = begun.set
    table = pa.table({"text": [f"row {i}" for i in range(2000)], "n": [100] * 2000})

    def later() -> None:
        assert begun.wait(300)
        shared.stream(Windows(shared.worker, table_of(3), 3), second)

    raised = in_threads(lambda: shared.stream(Windows(long, table, 2000), first, worker=long), later)
    assert raised == [None, None]
    assert second.joined_after is not None
    assert second.joined_after < 2000
    assert len(first.texts) == 2000
    assert len(second.texts) == 3


@pytest.mark.parametrize("shared", [simulated], indirect=True)
def test_what_a_sink_or_a_source_raises_ends_its_job_alone(shared: SharedWorker) -> None:
    bad, good = Rows(), Rows()

    def full() -> None:
        raise OSError("no space left on device")

    bad.on_write = full

    class Broken(Windows):
        def next(self, wait: bool) -> Window | None:
            if self.made:
                raise JobError("the input is gone")
            return super().next(wait)

    half = Rows()
    raised = in_threads(
        lambda: shared.stream(Windows(shared.worker, table_of(200), 50), bad),
        lambda: shared.stream(Windows(shared.worker, table_of(200), 50), good),
        lambda: shared.stream(Broken(shared.worker, table_of(20), 5), half),
    )
    assert str(raised[0]) == "no space left on device"
    assert raised[1] is None
    assert str(raised[2]) == "the input is gone"
    assert (len(bad.texts), len(good.texts)) == (0, 200)
    one, told = asked([1, 2, 3])
    shared.submit(one)
    assert told.wait().reason == FinishReason.LENGTH


@pytest.mark.parametrize("shared", [simulated], indirect=True)
def test_a_job_that_is_stopped_keeps_what_has_ended_and_leaves_the_engine_to_others(shared: SharedWorker) -> None:
    worker = shared.worker.asking(output_tokens="n", sampling=SamplingParams(max_tokens=4000))
    stopped, steps = Rows(), 0

    def stop() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            raise Stop(time.monotonic())

    stopped.after_each = stop
    lengths = [3] * 20 + [4000] * 200
    table = pa.table({"text": [f"row {i}" for i in range(220)], "n": lengths})
    with pytest.raises(Stop):
        shared.stream(Windows(worker, table, 220), stopped, worker=worker)
    assert 0 < len(stopped.texts) < 220
    after = Rows()
    shared.stream(Windows(shared.worker, table_of(5), 5), after)
    assert len(after.texts) == 5
    shared.close(60.0)
    assert shared.stats().running == 0
    assert shared.stats().tokens > 0


@pytest.mark.parametrize("shared", [simulated], indirect=True)
def test_an_engine_that_is_closed_tells_everyone(shared: SharedWorker) -> None:
    worker = shared.worker.asking(output_tokens="n", sampling=SamplingParams(max_tokens=10**6))
    sink, begun = Rows(), threading.Event()
    sink.after_each = begun.set
    running, told = asked([1, 2, 3], 10**6)
    shared.submit(running)
    table = pa.table({"text": ["x"], "n": [10**6]})

    def close() -> None:
        assert begun.wait(300)
        shared.close()

    raised = in_threads(lambda: shared.stream(Windows(worker, table, 1), sink, worker=worker), close)
    assert isinstance(raised[0], Stop)
    assert raised[1] is None
    assert told.wait().error is not None
    late, late_told = asked([1])
    shared.submit(late)
    assert late_told.wait().error is not None
    with pytest.raises(Stop):
        shared.stream(Windows(worker, table, 1), Rows())


@pytest.mark.parametrize("shared", [simulated], indirect=True)
def test_what_runs_may_end_within_the_grace_of_closing(shared: SharedWorker) -> None:
    one, told = asked([1, 2, 3], 500)
    shared.submit(one)
    shared.close(300.0)
    assert told.wait().error is None
    assert len(told.tokens) == 500


def test_an_engine_that_dies_whatever_it_is_given_ends_all(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(RecordedEngine, "execute", die)
    shared, (one, told) = SharedWorker(simulated(model)), asked([1])
    with pytest.raises(JobError, match="the engine dies whatever it is given"):
        shared.stream(Windows(shared.worker, table_of(20), 20), Rows())
    shared.submit(one)
    assert told.wait().error is not None
    assert isinstance(shared.error, JobError)
    shared.close()


def test_conversations_go_on_turn_by_turn(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TEMPLATE)
    table = pa.table({"turns": pa.array(TURNS, pa.list_(pa.string()))})
    given: dict[str, Any] = {"prompt": None, "turns": "turns"}
    shared, sink = SharedWorker(worker_of(folder, **given)), Rows()
    shared.stream(Windows(shared.worker, table, 2), sink)
    shared.close()
    assert sink.texts == answered_alone(worker_of(folder, **given), table)


def test_a_guest_may_ask_for_a_form(shared: SharedWorker) -> None:
    forms = [{"choice": ["yes", "no"]}, {"regex": "[ab]{3}c"}, {"choice": ["yes", "no"]}]
    told = [Ended() for _ in forms]
    for i, (form, one) in enumerate(zip(forms, told, strict=True)):
        shared.submit(guest([40 + i, 41], 20, one, structured_outputs=form)[0])
    texts = shared.worker.tokenizer.decode([one.wait().tokens for one in told])
    assert texts[0] in ("yes", "no")
    assert len(texts[1]) == 4
    assert texts[1][-1] == "c"
    assert texts[2] in ("yes", "no")


@dataclass
class Keeping(Rows):
    """A sink that keeps answers that have begun, too."""

    begun_rows: set[int] = field(default_factory=set)

    @property
    def keeps_begun(self) -> bool:
        return True

    def keep_begun(self, begun: Sequence[tuple[Window, BegunAnswers]]) -> None:
        rows = {window.first + row for window, answers in begun for row in answers.rows.tolist()}
        assert not rows & self.texts.keys()
        self.begun_rows |= rows


def test_each_caller_is_told_of_its_own_answers_that_have_begun(
    shared: SharedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AT_FIRST", "_SHARE"):
        monkeypatch.setattr(f"llmbatch.inference.answers.assembler.{name}", 0.0)
    sinks = Keeping(), Keeping(), Rows()
    tables = [pa.table({"text": [f"{which} {row}" for row in range(12)]}) for which in range(3)]
    calls = [partial(shared.stream, Windows(shared.worker, table, 12), sink) for table, sink in zip(tables, sinks)]
    assert in_threads(*calls) == [None] * 3
    assert sinks[0].begun_rows == sinks[1].begun_rows == set(range(12))
    assert [len(sink.texts) for sink in sinks] == [12, 12, 12]
