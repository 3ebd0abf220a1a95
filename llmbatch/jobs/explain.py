"""A forecast of a job: what a command would do, without loading weights or running the model."""

from __future__ import annotations

from typing import Any, Unpack

from llmbatch.arguments import Paths, check_names
from llmbatch.inference.window_size import window_rows as window_rows_of
from llmbatch.jobs.command import Command, offered_of
from llmbatch.jobs.forecast import Forecast, forecast_rows, spread_rows
from llmbatch.jobs.options import ExplainArgs, SearchArgs
from llmbatch.remote.opening import open_worker
from llmbatch.simulation.search import MOST_SIMULATED


def explain(inputs: Paths, **options: Unpack[ExplainArgs]) -> Forecast:
    """Forecast what `run` would do with these inputs and options, without loading weights or running the model.

    Of an input that is larger than a window, 20,000 rows are read at most, and the forecast says so. With `beside`,
    endpoints of llmbatch forecast, each beside the guests that it has had in the last hour. With `search` the best
    split of `devices` is found by the clock: how many share the model, how many copies run, and where weights and KV
    lie if the memory of their `device_host` is said.

    Raises `InputError` like `run`.

    >>> forecast = llmbatch.explain("questions.parquet", model="Qwen/Qwen3-0.6B", prompt="question", chat=True)
    >>> forecast.rows, forecast.binding
    (2, 'memory')
    """
    check_names(options, ExplainArgs.__annotations__)
    given: dict[str, Any] = {**options}
    offered = offered_of(**{name: given.pop(name) for name in SearchArgs.__annotations__ if name in given})
    command = Command.read(inputs, given)
    built, source = command.options, command.source
    worker = open_worker(built)
    worker.check(source.schema)
    rows = source.num_rows
    most = window_rows_of(None, rows, source.nbytes, built.sampling.max_tokens)
    table = source.read() if rows <= most else spread_rows(source, min(most, MOST_SIMULATED))
    found = forecast_rows(worker, table, offered, times=1.0 if rows <= most else rows / max(1, table.num_rows))
    return found if rows <= most else found.scaled(rows)


explain.__module__ = "llmbatch"  # which it is imported from
