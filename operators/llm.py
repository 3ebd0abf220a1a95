"""`LLMOperator`: a table in, the same rows with answers out.

Ray Data constructs a class once per actor, but unpickles an instance for every task, and would load the model
for every batch. So `LLMOperator(model=..., ...)` evaluates to a class of its own, configured by those options:
called with a table it answers it, called without arguments it constructs, which is what Ray does in each
actor. To a type checker that class is an instance, which is called with tables likewise. The loaded model is kept per
process and configuration, never on the class, because Ray pickles the class by value.
"""

from __future__ import annotations

import copyreg
import hashlib
from typing import Any, ClassVar, TypeVar, Unpack, cast

import pyarrow as pa

from llmbatch.arguments import whole
from llmbatch.inference.keywords import OptionArgs
from llmbatch.inference.options import Options
from llmbatch.operators.columns_read import answer_schema, columns_read
from llmbatch.operators.readers import answered_reader
from llmbatch.operators.tables import instance_of, to_arrow
from llmbatch.operators.workers import worker_of

Table = TypeVar("Table")
Operator = TypeVar("Operator")


def answer(options: Options, batch: Any, *, typed: bool = False) -> Any:
    """Return the batch with its answers, in the kind it came (`llmbatch.operators.tables`).

    Types of answers show if `typed`, also of those that are all null: what joins several batches needs that.
    """
    if isinstance(batch, pa.RecordBatchReader):
        return answered_reader(options, batch)
    if instance_of(batch, "polars", "LazyFrame"):
        from llmbatch.operators.polars_frames import answered_lazily

        return answered_lazily(options, batch)
    asked = to_arrow(batch, frozenset(columns_read(options)))
    shared = worker_of(options)
    answer_schema(shared, asked.schema)
    answered = shared.answer(asked.table).table
    back = asked.typed if typed and asked.typed is not None else asked.back
    return back(answered.select(range(asked.table.num_columns, answered.num_columns)))


class _Configured(type):
    """The metaclass: calling `LLMOperator` configures, calling what comes out answers or constructs."""

    def __call__(cls: type[Operator], *batches: Any, **options: Any) -> Operator:
        configured = cast("type[LLMOperator]", cls)
        if configured.options is None:
            made: Any = _configure(configured, batches, options)
        elif batches:
            made = answer(configured.options, *batches, **options)
        else:
            made = type.__call__(configured)
        return cast("Operator", made)

    def __repr__(cls) -> str:
        options = cast("type[LLMOperator]", cls).options
        return "LLMOperator" if options is None else f"LLMOperator(model={options.model!r})"


def _configure(cls: type[LLMOperator], batches: tuple[Any, ...], options: dict[str, Any]) -> type[LLMOperator]:
    """Make the subclass that carries options."""
    if batches:
        raise TypeError("LLMOperator takes keyword options only, for example model='Qwen/Qwen3-8B'")
    return _with_options(cls, Options.build(**options))


def _with_options(cls: type[LLMOperator], built: Options) -> type[LLMOperator]:
    name = f"LLMOperator_{hashlib.sha256(repr(built).encode()).hexdigest()[:12]}"
    body = {"options": built, "__module__": __name__, "__qualname__": name, "__doc__": cls.__doc__}
    return cast("type[LLMOperator]", _Configured(name, (cls,), body))


class LLMOperator(metaclass=_Configured):
    """Answers every row of a table with a language model.

    Options are keywords (all are listed in docs/options.md): `model`, one of `prompt=` (text, or token ids),
    `template=` (`"Q: {question}"`), `messages=` (a column of OpenAI messages) or `turns=` (a column of lists of user
    messages, answered in turn), `chat`, `system`, `chat_template_kwargs`, `sampling_params` (one for all, or the name
    of a column), sampling parameters by name (`max_tokens=256`), and where and how the model is run: `order`, `device`,
    `kv_memory` (bytes), ...
    Wrong ones raise `ParameterError` at once.

    Called on a pyarrow Table (or RecordBatch, RecordBatchReader, pandas DataFrame, Polars DataFrame or LazyFrame,
    DuckDB relation, Dataset of datasets, dict of arrays) it returns the same rows in the same order and the same kind,
    and a Table for anything else that has `__arrow_c_stream__`. All but readers and lazy frames are answered in memory;
    `stream` answers any of them as they are read. New columns are `generated_text`,
    `num_input_tokens`, `num_generated_tokens`, `num_cached_tokens` (int32), `finish_reason` ("stop", "length" or
    "error"), `error` and `error_kind` (null when fine), and `attempts` (int32). Raises `InputError` where the table
    or model will not do, `JobError` where no engine can be had, or a row failed and `on_error` is "raise".

    >>> answer = llmbatch.LLMOperator(model="Qwen/Qwen3-0.6B", prompt="question", chat=True, max_tokens=256)
    >>> list(answer({"question": ["Why is the sky blue?", "Why is grass green?"]}))[:2]
    ['question', 'generated_text']

    On Ray Data, `ds.map_batches(answer, concurrency=1, batch_size=50_000, batch_format="pyarrow")`.
    """

    options: ClassVar[Options | None] = None

    def __init__(self, **options: Unpack[OptionArgs]) -> None:
        """Take the options of `LLMOperator(...)`; the class that comes out of it carries them and takes none."""

    def __call__(self, batch: Table) -> Table:
        """Answer one table of many, which are joined: Ray constructs the class and calls it with each batch."""
        return cast("Table", answer(self._given(), batch, typed=True))

    @classmethod
    def stream(cls, batches: Any, *, window_rows: int | None = None) -> pa.RecordBatchReader:
        """Return a reader of the rows with their answers, which are computed as it is read, in bounded memory.

        `batches` are a RecordBatchReader, or any other table. `window_rows` are planned together: by default few at
        first, then as many as memory has room for. At most four windows are computed ahead of whoever reads; who stops
        reading drops the reader. Raises `InputError` at once where rows of this schema cannot be answered.

        >>> reader = answer.stream(pyarrow.dataset.dataset("questions.parquet"))
        """
        rows = None if window_rows is None else whole("window_rows", window_rows, 1)
        return answered_reader(cls._given(), batches, rows)

    @classmethod
    def _given(cls) -> Options:
        assert cls.options is not None, "LLMOperator(...) has options"
        return cls.options


def _reduce(operator: type[LLMOperator]) -> str | tuple[Any, ...]:
    """Tell pickle to make an operator anew, which is a class that no module has."""
    if operator.options is None:
        return operator.__qualname__
    return _with_options, (operator.__base__, operator.options)


LLMOperator.__module__ = "llmbatch"  # which it is imported from
copyreg.pickle(cast(Any, _Configured), cast(Any, _reduce))
