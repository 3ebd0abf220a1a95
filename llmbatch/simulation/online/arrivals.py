"""When requests arrive: by a trace's own times, scaled, or by chance.

A trace's rate is scaled as OOCO does (5.1.3), so that its peaks stay where they are: below 1 each request is kept with
that probability; above 1 all are kept, and copies, as many as are wanting, arrive at a random time between a request
and the next. Poisson arrivals have exponential gaps. Gamma arrivals have gaps of the same mean and a coefficient of
variation of their own: above 1 requests come in bursts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmbatch.errors import DataError, ParameterError

Times = NDArray[np.float64]


def read_arrivals(path: Path) -> Times:
    """Read the column `arrival_s` of a trace, in row order. Raises DataError where it is missing or wrong."""
    if "arrival_s" not in pq.read_schema(path).names:
        raise DataError(
            f"a trace must have arrival_s (seconds) to be run by its own times, but {path} has none: "
            "give arrivals (--arrivals poisson) and a rate a second"
        )
    column = pq.read_table(path, columns=["arrival_s"])["arrival_s"]
    try:
        times = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        raise DataError(f"arrival_s must hold seconds, but that of {path} holds {column.type}: convert it") from None
    wrong = ~np.isfinite(times) | (times < 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"arrival_s must be seconds from 0 on, but row {row} of {path} has {column[row].as_py()}")
    return np.asarray(times, np.float64)


def scaled(times: Times, rate: float, rng: np.random.Generator) -> tuple[NDArray[np.int64], Times]:
    """Return rows and their times, ascending, of a trace at `rate` times its own rate. Raises ParameterError."""
    if not rate > 0:
        raise ParameterError(f"rate must be above 0, got {rate:g}", option="rate", value=rate)
    order = np.argsort(times, kind="stable")
    copies = np.full(len(times), int(rate)) + (rng.random(len(times)) < rate - int(rate))
    rows = np.repeat(order, copies)
    first = np.concatenate(([True], rows[1:] != rows[:-1])) if len(rows) else np.empty(0, np.bool_)
    following = np.append(times[order][1:], times[order][-1:])
    until = np.repeat(following, copies)
    there = times[rows]
    there = np.where(first, there, there + rng.random(len(rows)) * (until - there))
    by_time = np.argsort(there, kind="stable")
    return rows[by_time], there[by_time]


def drawn(rate: float, seconds: float, rng: np.random.Generator, *, variation: float = 1.0) -> Times:
    """Draw arrivals of `rate` a second over so many seconds, ascending.

    `variation` is the coefficient of variation of gaps; 1 is Poisson. Raises ParameterError.
    """
    for name, value in (("per_second", rate), ("duration", seconds), ("burstiness", variation)):
        if not 0 < value < np.inf:
            raise ParameterError(f"{name} must be above 0, got {value:g}", option=name, value=value)
    shape = 1.0 / variation**2
    expected = rate * seconds
    count = int(expected + 10.0 * max(1.0, variation) * np.sqrt(expected) + 100)
    times = np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count))
    while times[-1] < seconds:
        times = np.append(times, times[-1] + np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count)))
    return np.asarray(times[times < seconds], np.float64)


def uniform(rate: float, count: int) -> Times:
    """Return arrivals at equal distances, `rate` a second. Raises ParameterError."""
    if not 0 < rate < np.inf:
        raise ParameterError(f"offline_rate must be above 0, got {rate:g}", option="offline_rate", value=rate)
    return np.arange(count) / rate
