"""Streams of answers: in order, in bounded memory, and none in another's way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmbatch import DataError, JobError, LLMOperator, ParameterError
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.window_size import HELD
from llmbatch.operators import answer_stream
from llmbatch.operators.answer_stream import AnswerStream
from llmbatch.operators.readers import BatchesOfArrow
from llmbatch.operators.row_windows import RowWindows
from llmbatch.operators.workers import worker_of

SCHEMA = pa.schema({"id": pa.int64(), "text": pa.string(), "tokens": pa.int32()})
ROWS = 300


@pytest.fixture(scope="module")
def operator(model: str) -> Any:
    return LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=64, output_tokens="tokens")


def rows_of(count: int, first: int = 0) -> pa.RecordBatch:
    """Rows whose answers are of many lengths."""
    ids = range(first, first + count)
    lengths = np.random.default_rng(first).integers(1, 64, count)
    return pa.record_batch([list(ids), [f"row {i}" for i in ids], lengths.astype(np.int32)], schema=SCHEMA)


class Read:
    """A reader that counts the rows that were taken from it, and may fail after some."""

    def __init__(self, fails_after: int = 2**31) -> None:
        self.rows = 0
        self.closed = False
        self.fails_after = fails_after
        self.reader = pa.RecordBatchReader.from_batches(SCHEMA, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for first in range(0, ROWS, 5):
                if first >= self.fails_after:
                    raise ValueError("the line is dead")
                self.rows += 5
                yield rows_of(5, first)
        finally:
            self.closed = True


def ended() -> None:
    """Wait until no stream has a thread."""
    gc.collect()
    for stream in list(answer_stream._live):
        stream.join()


def test_a_stream_gives_the_rows_in_order_with_the_answers_of_a_table(operator: Any) -> None:
    told = ["id", "text", "generated_text", "num_generated_tokens", "finish_reason", "error"]
    table = pa.Table.from_batches([rows_of(ROWS)], SCHEMA.with_metadata({"kept": "yes"}))
    answered = operator.stream(table, window_rows=32)
    assert isinstance(answered, pa.RecordBatchReader)
    assert answered.schema.names == [*SCHEMA.names, *AnswerSchema().columns.names]
    assert answered.schema.metadata == {b"kept": b"yes"}
    assert answered.read_all().select(told).equals(operator(table).select(told))


def test_a_model_answers_a_stream_as_it_answers_a_table(model: str) -> None:
    operator: Any = LLMOperator(
        model=model, prompt="text", max_tokens=6, kv_memory=2**24, dtype="float32", temperature=1.0, seed=3
    )
    table = pa.table({"text": [f"a prefix, then {i % 11}" for i in range(60)]})
    answered = operator.stream(table, window_rows=7).read_all()
    assert answered["generated_text"].equals(operator(table)["generated_text"])


def test_rows_are_read_a_few_windows_ahead_of_whoever_takes_the_answers(operator: Any) -> None:
    read, taken = Read(), 0
    for batch in operator.stream(read.reader, window_rows=10):
        taken += batch.num_rows
        assert read.rows <= taken + 10 * (HELD + 1)
    assert (taken, read.closed) == (ROWS, True)


def test_who_stops_reading_ends_the_stream_and_frees_the_engine(operator: Any) -> None:
    read = Read()
    answered = operator.stream(read.reader, window_rows=10)
    answered.read_next_batch()
    del answered
    ended()
    assert read.rows <= 10 * (HELD + 1) + 10
    assert operator(pa.Table.from_batches([rows_of(3)])).num_rows == 3


def test_a_stream_that_nobody_reads_starts_nothing(operator: Any) -> None:
    read = Read()
    answered = operator.stream(read.reader)
    assert read.rows == 0
    del answered


def test_streams_of_one_engine_do_not_wait_for_each_other(operator: Any) -> None:
    streams = [operator.stream(Read().reader, window_rows=40) for _ in range(3)]
    for batches in zip(*streams, strict=True):
        assert len({tuple(batch["generated_text"].to_pylist()) for batch in batches}) == 1
        assert operator(pa.Table.from_batches([batches[0].select(SCHEMA.names)])).num_rows == batches[0].num_rows


def test_a_stream_of_a_stream_runs_on_one_engine(operator: Any) -> None:
    inner = operator.stream(Read().reader, window_rows=10)
    again = pa.RecordBatchReader.from_batches(SCHEMA, (batch.select(SCHEMA.names) for batch in inner))
    assert operator.stream(again, window_rows=7).read_all()["id"].to_pylist() == list(range(ROWS))


def test_an_error_of_the_input_comes_after_the_rows_before_it(operator: Any) -> None:
    read, taken = Read(fails_after=100), 0
    with pytest.raises(ValueError, match=r"^the line is dead$"):  # noqa: PT012  # the loop is what raises
        for batch in operator.stream(read.reader, window_rows=10):
            taken += batch.num_rows
    assert taken == 100


def test_an_error_of_the_engine_reaches_who_reads(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = worker_of(operator.options).worker
    engine = worker.load().engine()

    def broken(step: Any) -> Any:
        raise MemoryError("no more of it")

    monkeypatch.setattr(type(engine), "execute", broken)
    with pytest.raises(JobError, match=r"^the engine dies whatever it is given"):
        operator.stream(Read().reader).read_all()
    monkeypatch.undo()
    ended()
    assert operator.stream(Read().reader).read_all().num_rows == ROWS


def test_a_row_that_fails_is_told_by_its_number_in_the_stream(model: str) -> None:
    operator: Any = LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=2, on_error="raise")
    table = pa.table({"text": ["a"] * 25 + [None]})
    with pytest.raises(JobError, match=r"^row 25 failed \(null_prompt\): prompt is null; on_error='column'"):
        operator.stream(table, window_rows=10).read_all()


def test_a_stream_without_rows_has_the_columns(operator: Any) -> None:
    answered = operator.stream(pa.Table.from_batches([rows_of(0)]))
    assert answered.read_all().column_names == [*SCHEMA.names, *AnswerSchema().columns.names]


def test_what_cannot_be_streamed_is_refused_at_once(operator: Any) -> None:
    with pytest.raises(DataError, match=r"^the prompt column 'text' is not in the input, whose columns are 'id'$"):
        operator.stream(pa.table({"id": [1]}))
    with pytest.raises(DataError, match=r"^the prompt column 'text' is not in the input, which has no columns$"):
        operator.stream(pa.table({}))
    with pytest.raises(DataError, match=r"^LLMOperator takes a pyarrow Table, .*, got int$"):
        operator.stream(3)
    with pytest.raises(ParameterError, match=r"^window_rows must be at least 1, got 0$"):
        operator.stream(pa.Table.from_batches([rows_of(1)]), window_rows=0)


class Counted:
    """Chunks that take a given number of bytes a row."""

    def __init__(self, nbytes: int) -> None:
        self.each = nbytes

    def read(self, chunk: range) -> pa.Table:
        raise NotImplementedError

    def nbytes(self, chunk: range) -> int:
        return self.each * len(chunk)

    def cut(self, chunk: range, first: int, rows: int) -> range:
        return chunk[first : first + rows]


def windows_of(chunks: list[range], nbytes: int, asked: int | None = None) -> list[list[int]]:
    """Rows of each window."""
    windows = RowWindows(iter(chunks), Counted(nbytes), asked=asked, max_tokens=0)
    return [[row for chunk in found for row in chunk] for found in iter(windows.next, [])]


def test_windows_grow_up_to_what_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbatch.inference.window_size.available_memory", lambda: 1 << 40)
    chunks = [range(first, first + 1000) for first in range(0, 300_000, 1000)]
    found = windows_of(chunks, 1)
    assert [row for window in found for row in window] == list(range(300_000))
    assert [len(window) for window in found] == [1024, 4096, 16384, 65536, 100_000, 100_000, 12_960]
    fat = windows_of(chunks[:40], 10_000)
    assert [len(window) for window in fat[:4]] == [1024, 1677, 1677, 1677]
    assert windows_of([range(5)], 1 << 40) == [[0], [1], [2], [3], [4]]


def test_windows_of_a_number_of_rows_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = windows_of([range(0), range(7), range(7, 7), range(7, 12)], 1 << 40, asked=5)
    assert found == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_rows_that_were_taken_are_not_kept(operator: Any) -> None:
    batches = (rows_of(5, first) for first in range(0, ROWS, 5))
    kind = BatchesOfArrow(frozenset({"text", "tokens"}))
    taken: list[weakref.ref[pa.RecordBatch]] = []
    for rows, _ in AnswerStream(worker_of(operator.options), batches, kind, window_rows=20):
        assert all(batch() is None for batch in taken)
        taken.append(weakref.ref(rows))
        del rows
    assert len(taken) == ROWS // 5
