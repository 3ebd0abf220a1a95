"""Who rows in an engine are of: a call of this actor, or another actor's, which lends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.preprocess.request_batch import BegunAnswers


class RowsOwner(ABC):
    """Is told of its rows, between two steps; rows are numbered as its table has them."""

    @abstractmethod
    def begun(self, rows: NDArray[np.int64]) -> None:
        """Take note of rows that are given to the engine, some of them perhaps once more."""

    @abstractmethod
    def answered(self, rows: NDArray[np.int64], answers: pa.RecordBatch) -> None:
        """Take the answers of rows; `answers` are of `AnswerSchema.rows`."""

    def keep_begun(self, begun: Sequence[tuple[NDArray[np.int64], BegunAnswers]]) -> None:
        """Take what unfinished answers have so far, of some rows each."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Learn that the engine is no more."""
