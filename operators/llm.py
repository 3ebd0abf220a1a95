"""`LLMOperator`: a table in, the same rows with answers out.

Ray Data constructs a class once per actor, but unpickles an instance for every task, and would load the model
for every batch. So `LLMOperator(model=..., ...)` evaluates to a class of its own, configured by those options:
called with a table it answers it, called without arguments it constructs, which is what Ray does in each
actor. Type checkers see an ordinary class whose instances are called with tables. The loaded model is kept per
process and configuration, never on the class, because Ray pickles the class by value.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.operators.tables import to_arrow

Batch = TypeVar("Batch")

_workers: dict[str, Worker] = {}  # by configuration


def worker_of(options: Options) -> Worker:
    """The worker of a configuration: one process loads a model once."""
    key = repr(options)
    if key not in _workers:
        _workers[key] = Worker(options)
    return _workers[key]


def answer(options: Options, batch: Any) -> Any:
    """The batch with its answers, in the kind it came (`llmbatch.operators.tables`)."""
    asked = to_arrow(batch)
    return asked.back(worker_of(options).answer(asked.table).table)


if TYPE_CHECKING:

    class LLMOperator:
        """See below."""

        def __init__(self, **options: Any) -> None: ...
        def __call__(self, batch: Batch) -> Batch: ...

else:

    class _Configured(type):
        """The metaclass: calling `LLMOperator` configures, calling what comes out answers or constructs."""

        def __call__(cls, *batches: Any, **options: Any) -> Any:
            if cls.options is None:
                if batches:
                    raise TypeError("LLMOperator takes keyword options only, for example model='Qwen/Qwen3-8B'")
                built = Options.build(**options)
                name = f"LLMOperator_{hashlib.sha256(repr(built).encode()).hexdigest()[:12]}"
                body = {
                    "options": built,
                    "__module__": __name__,
                    "__qualname__": name,
                    "__doc__": cls.__doc__,
                }
                return _Configured(name, (cls,), body)
            if batches:
                return answer(cls.options, *batches, **options)
            return super().__call__()

        def __repr__(cls) -> str:
            return "LLMOperator" if cls.options is None else f"LLMOperator(model={cls.options.model!r})"

    class LLMOperator(metaclass=_Configured):
        """Answers every row of a table with a language model.

        Options are keywords: `model`, one of `prompt=` (a text column), `template=` (`"Q: {question}"`) or
        `messages=` (a column of OpenAI messages), `chat`, `system`, `chat_template_kwargs`, `sampling_params`
        (one for all, or the name of a column), sampling parameters by name (`max_tokens=256`), `order`,
        `device` ("auto", "cpu", "cuda", "cuda:1"), `attention`, `dtype`, `kv_memory` (bytes), `page_size` (tokens),
        `max_running` (rows in flight), `row_timeout` (seconds), `on_error` ("column" or "raise").
        Wrong ones raise `ParameterError` at once.

        Called on a pyarrow Table (or RecordBatch, RecordBatchReader, pandas DataFrame, Polars DataFrame or LazyFrame,
        dict of arrays) it returns the same rows in the same order and the same kind, and a Table for anything else
        that has `__arrow_c_stream__`, such as a DuckDB relation. New columns are `generated_text`,
        `num_input_tokens`, `num_generated_tokens`, `num_cached_tokens` (int32), `finish_reason` ("stop", "length" or
        "error"), `error` and `error_kind` (null when fine), and `attempts` (int32). Raises `InputError` where the table
        or model will not do, `JobError` where no engine can be had, or a row failed and `on_error` is "raise".

            answer = LLMOperator(model="Qwen/Qwen3-8B", prompt="question", chat=True, max_tokens=256)
            table = answer(table)
            ds = ds.map_batches(answer, concurrency=1, batch_size=50_000, batch_format="pyarrow")
        """

        options: Options | None = None

        def __call__(self, batch: Any) -> Any:
            return answer(type(self).options, batch)
