"""`df.llm` on frames of Polars and pandas: other spellings of a call of the operator.

`import llmbatch` registers these where Polars or pandas is imported, before or after it (`llmbatch._namespaces`), and
likewise the model `llmbatch` with lm-evaluation-harness.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Generic, TypeVar

from llmbatch.arguments import whole
from llmbatch.errors import ParameterError

F = TypeVar("F")


class Generating(Generic[F]):
    """What a language model does with a frame."""

    def __init__(self, frame: F) -> None:
        self._frame = frame

    def generate(self, op: Any) -> F:
        """Return the frame with the answers of `op`, an `LLMOperator(...)`: `op(frame)`."""
        answered: F = _operator(op)(self._frame)
        return answered


class GeneratingLazily(Generating[F]):
    """What a language model does with a frame that is not computed yet."""

    def generate(self, op: Any, *, window_rows: int | None = None) -> F:
        """Return a lazy frame with the answers of `op`, an `LLMOperator(...)`, computed as rows are asked for.

        Filters on columns of the input and `head` are applied before the model, and columns that nobody reads are not
        carried; `explain()` shows it. `window_rows` are planned together: by default few at first, then as many as
        memory has room for.
        """
        from llmbatch.operators.polars_frames import answered_lazily

        frame: Any = self._frame
        rows = None if window_rows is None else whole("window_rows", window_rows, 1)
        answered: Any = answered_lazily(_operator(op).options, frame, rows)
        return answered  # type: ignore[no-any-return]


def register_polars() -> None:
    """Give frames of Polars the namespace `llm`."""
    polars = sys.modules["polars"]
    if getattr(polars.DataFrame, "llm", None) is not Generating:
        polars.api.register_dataframe_namespace("llm")(Generating)
        polars.api.register_lazyframe_namespace("llm")(GeneratingLazily)


def register_pandas() -> None:
    """Give frames of pandas the accessor `llm`."""
    pandas = sys.modules["pandas"]
    if getattr(pandas.DataFrame, "llm", None) is not Generating:
        pandas.api.extensions.register_dataframe_accessor("llm")(Generating)


def register_harness_model() -> None:
    """Tell lm-evaluation-harness where the model `llmbatch` is, without importing it."""
    registry: Any = import_module("lm_eval.api.registry")
    registry.model_registry.register("llmbatch", target="llmbatch.operators.lm_eval:HarnessModel")


def _operator(op: Any) -> Any:
    from llmbatch.operators.llm import LLMOperator

    if not (isinstance(op, type) and issubclass(op, LLMOperator)) or op.options is None:
        raise ParameterError(f"generate takes LLMOperator(...), got {op!r}", option="op", value=op)
    return op
