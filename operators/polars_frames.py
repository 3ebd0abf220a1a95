"""Lazy frames of Polars, answered as they are read.

An answered lazy frame is an IO source to Polars. Polars tells a source which columns are read, which filter it may
apply and how many rows are wanted; all of that is put into the lazy frame that was asked, below the model. A filter is
a conjunction: the parts that look at columns of the input alone go below, the others are applied to the answers. Where
no answer is read the model does not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from llmbatch.inference.options import Options
from llmbatch.operators.answer_stream import AnswerStream
from llmbatch.operators.columns_read import answer_schema, columns_read, outline
from llmbatch.operators.readers import ROWS
from llmbatch.operators.tables import explained
from llmbatch.operators.workers import LockedWorker, worker_of

_NAMES_NODES = "explain_name" in inspect.signature(register_io_source).parameters  # in what `explain()` shows


@dataclass(frozen=True, slots=True)
class Frames:
    """Data frames as chunks of a stream."""

    columns: frozenset[str]  # that are read

    def read(self, chunk: pl.DataFrame) -> pa.Table:
        """Return the columns that prompts are made of."""
        return chunk.select([name for name in chunk.columns if name in self.columns]).to_arrow()

    def nbytes(self, chunk: pl.DataFrame) -> int:
        """Count the bytes that the rows take in memory."""
        return int(chunk.estimated_size())

    def cut(self, chunk: pl.DataFrame, first: int, rows: int) -> pl.DataFrame:
        """Return some rows, without copying them."""
        return chunk.slice(first, rows)


@dataclass(frozen=True, slots=True)
class _AnsweredFrame:
    """A lazy frame and the model that answers its rows."""

    frame: pl.LazyFrame
    shared: LockedWorker
    inputs: list[str]  # names of columns
    answers: dict[str, pl.DataType]
    read: frozenset[str]  # of the inputs, by the model
    window_rows: int | None

    def rows(
        self, with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield what Polars asks for: so many first rows, of these the ones that pass, of these some columns."""
        names = [*self.inputs, *self.answers] if with_columns is None else with_columns
        parts = [] if predicate is None else _conjuncts(predicate)
        after = [part for part in parts if not self.answers.keys().isdisjoint(part.meta.root_names())]
        before = [part for part in parts if not any(part is other for other in after)]
        seen = {*names, *(name for part in after for name in part.meta.root_names())}
        frame = self.frame if n_rows is None else self.frame.head(n_rows)
        frame = frame.filter(*before) if before else frame
        if self.answers.keys().isdisjoint(seen):
            yield from _collected(frame.select(names))
            return
        frame = frame.select([name for name in self.inputs if name in seen or name in self.read])
        stream = AnswerStream(self.shared, _collected(frame), Frames(self.read), window_rows=self.window_rows)
        with closing(iter(stream)) as answered:
            for whole in starmap(_joined, answered):
                yield (whole.filter(*after) if after else whole).select(names)
                del whole  # no rows are kept while others are waited for


def answered_lazily(options: Options, frame: pl.LazyFrame, window_rows: int | None = None) -> pl.LazyFrame:
    """Return a lazy frame with the answers' columns. Nothing is read before it is collected.

    The model is found, but its weights are not loaded. Raises InputError where rows of this schema cannot be answered.
    """
    inputs = frame.collect_schema()
    shared, read = worker_of(options), frozenset(columns_read(options))
    known = pl.DataFrame(schema={name: kind for name, kind in inputs.items() if name in read})
    with explained(frame):
        types = known.to_arrow().schema
    answers = answer_schema(shared, outline(inputs.names(), types))
    columns = dict(_from_arrow(answers.empty_table()).schema)
    asked = _AnsweredFrame(frame, shared, inputs.names(), columns, read, window_rows)
    shown: dict[str, Any] = {}
    if _NAMES_NODES:
        shown["explain_name"] = "llm.generate"
        shown["explain_detail"] = f"{options.model} reads {', '.join(sorted(read))} and adds {', '.join(columns)}"
    return register_io_source(asked.rows, schema={**inputs, **columns}, is_pure=True, **shown)


def _collected(frame: pl.LazyFrame) -> Iterator[pl.DataFrame]:
    yield from frame.collect_batches(chunk_size=ROWS, maintain_order=True, engine="streaming")


def _joined(chunk: pl.DataFrame, answers: pa.Table) -> pl.DataFrame:
    return chunk.hstack(_from_arrow(answers))


def _from_arrow(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _conjuncts(predicate: pl.Expr) -> list[pl.Expr]:
    """Cut a filter into the parts that must all hold."""
    operands = predicate.meta.pop()
    if len(operands) == 2 and (operands[1] & operands[0]).meta == predicate:
        return [*_conjuncts(operands[1]), *_conjuncts(operands[0])]
    return [predicate]
