"""Rows of another actor's shard in the engine of this one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.operators.ray.in_flight import InFlightRows
from llmbatch.operators.ray.lending.loans import Loan, LoanAnswers
from llmbatch.operators.ray.rows_owner import RowsOwner


class BorrowedRows(RowsOwner):
    """A loan. Its rows are in flight here, so that this process is suspected of them, and they of it, if it dies."""

    def __init__(self, loan: Loan, flight: InFlightRows, tell: Callable[[LoanAnswers], None]) -> None:
        """Have answers told by `tell`."""
        self.loan = loan
        self._flight, self._tell = flight, tell
        self._slots = np.full(len(loan.known), -1, np.int64)  # in the flight
        self._left = len(loan.known)

    @property
    def is_over(self) -> bool:
        """Whether all of its rows are answered."""
        return self._left == 0

    def begun(self, rows: NDArray[np.int64]) -> None:
        """Take note of rows that are given to the engine, some of them perhaps once more."""
        fresh = rows[self._slots[rows] < 0]
        self._slots[fresh] = self._flight.enter(self.loan.known[fresh])

    def answered(self, rows: NDArray[np.int64], answers: pa.RecordBatch) -> None:
        """Send answers of rows to who lent them."""
        self._left -= len(rows)
        slots = self._slots[rows]
        self._flight.leave(slots[slots >= 0])
        columns = [pa.array(rows.astype(np.int32)), *answers.columns[1:]]
        self._tell(LoanAnswers(self.loan.number, pa.RecordBatch.from_arrays(columns, schema=answers.schema)))

    def fail(self, error: BaseException) -> None:
        """Leave the rows to who lent them, who is told that this engine is no more."""
