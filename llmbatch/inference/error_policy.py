"""Whether a job may go on although rows have failed."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from llmbatch.errors import JobError
from llmbatch.inference.answers.schema import errors_of


class ErrorBudget:
    """Ends a job at its first failed row, or when so many have failed that its rate of errors cannot be kept.

    The rate is that of all rows of the job: errors come in no even order, and a rate of those answered so far would
    end jobs that are well below it in the end.
    """

    def __init__(self, *, rows: int, max_error_rate: float | None, raises: bool) -> None:
        self._rows = rows
        self._rate = max_error_rate
        self._most = rows if max_error_rate is None else math.floor(max_error_rate * rows + 1e-9)
        self._raises = raises
        self._errors = 0
        self.first_error: str | None = None  # that was seen, with its row

    def answered(self, first: int, rows: pa.RecordBatch) -> None:
        """Count the answered rows of a window that begins with row `first`. Raises `JobError`."""
        failed = errors_of(rows)
        first_error = None
        if failed and (self._raises or self.first_error is None):
            at = int(np.flatnonzero(rows["error"].is_valid().to_numpy(zero_copy_only=False))[0])
            row = first + rows["row"][at].as_py()
            if self._raises:
                raise JobError(
                    f"row {row} failed ({rows['error_kind'][at]}): {rows['error'][at]}; "
                    "on_error='column' (--on-error column) keeps such rows, with their error, and goes on"
                )
            first_error = f"row {row}: {rows['error'][at]}"
        self.count(failed, first_error)

    def count(self, errors: int, first_error: str | None = None) -> None:
        """Count rows that failed, in this run or an earlier one, the first of them with an error. Raises `JobError`."""
        if errors and self._raises:
            raise JobError(
                f"{errors:,} rows failed in an earlier run, and on_error='raise' (--on-error raise) ends a job at the "
                "first: answer them again with retry_errors=True (--retry-errors), or keep them with on_error='column'"
            )
        self._errors += errors
        self.first_error = self.first_error or first_error
        if self._errors > self._most:
            why = "" if self.first_error is None else f" ({self.first_error})"
            raise JobError(
                f"max_error_rate is {self._rate:g}, and {self._errors:,} of {self._rows:,} rows have failed "
                f"already{why}: what is answered is kept; mend these rows or what failed them, and run the same "
                "command again with retry_errors=True (--retry-errors), or with a higher rate; with other options, "
                "start over (--restart)"
            )
