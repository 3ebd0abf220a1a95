"""What a job will take, before it runs; and what its order buys, by simulation.

The shard is planned as it would be, with what is believed of lengths before anything was observed, and driven through
the same scheduler over an engine that is a clock, once in the plan's order and once in the input's. Each answer has a
length of its own, drawn from what is believed: memory grows with the square of lengths, and rows of the mean length
each would take half of the time.

How near it comes. Where the pool holds many rows a job whose lengths are what is believed takes within 5 % of its
forecast. Where it holds a few, steps are so small that seconds are as many as tokens are, and the tokens of one job
are chance: they deviate by the root of the sum of the rows' variances over the sum of their means. That is .6 / sqrt(n)
of n rows that end anywhere up to one max_tokens, 3 % of 400, and 9 % of 300 rows half of which may be 32 times as long
as the others.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.engine.model.outline import shape_on_gpus
from llmbatch.errors import ParameterError
from llmbatch.figures import Figures, seconds_in_words
from llmbatch.inference.options import Options
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.worker import Worker
from llmbatch.io.reading.dataset import Dataset
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.shares import fitting_ranks
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.order import Policy
from llmbatch.planning.plan_workload import plan_workload
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import (
    Pool,
    Scheduling,
    Workload,
    check_simulated_pool,
    early_ends,
    fit_requests,
    split_for,
    work_of,
)
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.runtime.loops.simulated_loop import SimulatedLoop
from llmbatch.runtime.shard_run import run_shard
from llmbatch.simulation.search import MOST_SIMULATED, SearchedSplit, search_requests
from llmbatch.simulation.splits import Offered, splits_of

_DRAWS = 3  # of lengths, at most: in a small pool the seconds of one differ from another's by 5 %
_RUNS = 16  # of neighbouring rows, by which an input is forecast that is too large to be read


@dataclass(frozen=True, kw_only=True)
class Forecast(Figures):
    """What `run` would do. Seconds are those of steps: loading, reading and writing come on top."""

    rows: int
    errors: int
    duplicates: int
    input_tokens: int
    output_tokens: float  # expected
    output_tokens_most: int  # if every answer ran to max_tokens
    prefix_sharing_optimal: float
    density: float  # compute over memory seconds
    binding: str  # "compute" or "memory"
    seconds: float | None  # simulated; null where there are too many requests to simulate
    seconds_least: float  # if answers were single tokens and everything overlapped best
    seconds_most: float  # if every answer ran to max_tokens, with steps as far from the best as simulated
    input_order_seconds: float | None  # simulated, rows in the input's order
    prefix_sharing: float | None  # simulated
    kv_tokens_needed: float  # to hold everything at once
    kv_tokens: int  # that the pool holds
    order: str
    reason: str
    model: str
    hardware: str
    notes: tuple[str, ...]
    splits: tuple[SearchedSplit, ...] = ()  # of devices that are offered, the best first

    def scaled(self, rows: int) -> Forecast:
        """Return the forecast of so many rows of which it has seen runs, spread evenly."""
        times = rows / max(1, self.rows)

        def whole(count: int) -> int:
            return round(count * times)

        def longer(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * times

        note = f"{self.rows:,} of {rows:,} rows were read, in runs spread evenly; other figures are estimated by them"
        return replace(
            self,
            rows=rows,
            errors=whole(self.errors),
            duplicates=whole(self.duplicates),
            input_tokens=whole(self.input_tokens),
            output_tokens=self.output_tokens * times,
            output_tokens_most=whole(self.output_tokens_most),
            seconds=longer(self.seconds),
            seconds_least=self.seconds_least * times,
            seconds_most=self.seconds_most * times,
            input_order_seconds=longer(self.input_order_seconds),
            kv_tokens_needed=self.kv_tokens_needed * times,
            notes=(note, *self.notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        told = asdict(self)
        return {**told, "notes": list(told["notes"]), "splits": list(told["splits"])}

    def _in_words(self) -> list[tuple[str, str]]:
        """Say each figure in words, by its name."""
        rows = ("rows", f"{self.rows:,} ({self.errors:,} errors, {self.duplicates:,} duplicates)")
        if self.errors == self.rows:
            return [rows, ("time", "none, since no row can be run"), *(("note", note) for note in self.notes)]
        said = [
            rows,
            ("prompt tokens", f"{self.input_tokens:,}, of which {self.prefix_sharing_optimal:.1%} can be shared"),
            ("answer tokens", f"{self.output_tokens:,.0f} expected, {self.output_tokens_most:,} at most"),
            ("density", f"{self.density:.3g} compute / memory, bound by {self.binding}"),
            (
                "KV memory",
                f"{self.kv_tokens_needed:,.0f} tokens hold everything, the pool holds {self.kv_tokens:,}",
            ),
            ("order", f"{self.order}: {self.reason}"),
        ]
        bounds = f"between {seconds_in_words(self.seconds_least)} and {seconds_in_words(self.seconds_most)}"
        if self.seconds is not None and self.input_order_seconds is not None:
            times = f"{self.input_order_seconds / self.seconds:.2f} x"
            seconds, input_order = seconds_in_words(self.seconds), seconds_in_words(self.input_order_seconds)
            said += [
                ("time", f"{seconds} s expected on {self.hardware}, {bounds}"),
                ("order buys", f"{times} over the input's order ({input_order} s)"),
            ]
        else:
            unknown = f"more than {MOST_SIMULATED:,} requests are not simulated"
            said.append(("time", f"{bounds} s on {self.hardware}; {unknown}"))
        ranks = ("best split", "runner-up")
        said += [(ranks[i] if i < len(ranks) else "then", split.in_words) for i, split in enumerate(self.splits)]
        return [*said, *(("note", note) for note in self.notes)]


Forecast.__module__ = "llmbatch"  # which it is imported from


def forecast_rows(
    worker: TableWorker, table: pa.Table, offered: Offered | None = None, *, times: float = 1.0
) -> Forecast:
    """Forecast answering the rows of a table, by the endpoints of a worker that has no engine here.

    Of devices that are offered the best split is searched, for a job of `times` as many rows.
    """
    figures = worker.forecast_elsewhere(table)
    if figures is not None and offered:
        raise ParameterError(
            "search must lay the model on devices, got endpoints too: leave out beside (--beside)", option="search"
        )
    if figures is not None:
        return Forecast(**{**figures, "notes": tuple(figures["notes"])})
    assert isinstance(worker, Worker), "other workers forecast elsewhere"
    shard = worker.shard(table)
    if worker.options.engine == "simulated":
        check_simulated_pool(worker.pool, worker.model.bytes_per_token)
    found = forecast(worker.options, shard, worker.pool, worker.cost, worker.scheduling, worker.notes)
    if offered is None:
        return found
    options = worker.options
    shape = shape_on_gpus(worker.model, options.dtype, options.kv_cache_dtype)
    ranks = fitting_ranks(worker.model.config)
    splits = splits_of([offer.fitting(ranks) for offer in offered.devices], shape, offered.host)
    return replace(found, splits=search_requests(shard.requests, splits, worker.scheduling, times=times))


def forecast(
    options: Options,
    shard: RowRequests,
    pool: Pool,
    cost: CostModel,
    scheduling: Scheduling,
    notes: tuple[str, ...] = (),
) -> Forecast:
    """Forecast answering the rows of a table, of which `shard` holds the requests; `notes` are told with it."""
    requests, refused, cut = fit_requests(shard.requests, pool)
    workload = Workload.of(requests).without(refused)
    pool = split_for(pool, workload)
    tree, answered = workload.tree, (shard.request_of >= 0) & ~np.isin(shard.request_of, list(refused))
    everything = np.arange(len(requests), dtype=np.int32)
    lengths = workload.length_model()
    expected = lengths.expected(everything).mean
    plan = plan_workload(workload, pool, cost, scheduling)
    buys = compare_drawn(requests, lengths, pool, cost, scheduling)
    optimal = partial(_optimal, tree, pool=pool, cost=cost)
    asked = shard.request_of[answered] if shard.asks is None else shard.asks.requests
    inputs = int(shard.num_input_tokens[answered].sum())
    # Texts that are scored are part of the tree, several behind each prompt.
    shared = inputs if options.continuation is None else int(requests.prompt_lengths[asked].sum())
    return Forecast(
        rows=len(shard.request_of),
        errors=len(shard.errors) + int(np.isin(shard.request_of, list(refused)).sum()),
        duplicates=len(asked) - len(np.unique(asked)),
        input_tokens=inputs,
        output_tokens=float(expected.sum()),
        output_tokens_most=int(requests.max_tokens.sum(dtype=np.int64)),
        prefix_sharing_optimal=1 - tree.unique_tokens / shared if shared else 0.0,
        density=plan.density,
        binding=plan.binding,
        seconds=buys.seconds if buys else None,
        seconds_least=optimal(np.ones_like(expected)),
        seconds_most=optimal(requests.max_tokens.astype(np.float64)) * _times_optimal(buys, optimal(expected)),
        input_order_seconds=buys.input_order_seconds if buys else None,
        prefix_sharing=buys.prefix_sharing if buys else None,
        kv_tokens_needed=plan.kv_tokens_needed,
        kv_tokens=pool.tokens,
        order=options.order,
        reason=plan.reason,
        model=options.model,
        hardware=cost.hardware.name,
        notes=(*notes, *shard.notes, *early_ends(int(np.isin(shard.request_of, cut).sum()), pool)),
    )


@dataclass(frozen=True, slots=True)
class OrderGain:
    """Simulated steps of a shard in its planned order and in the input's."""

    seconds: float
    input_order_seconds: float
    prefix_sharing: float  # of the planned order


def compare(
    requests: RequestBatch, lengths: NDArray[np.int32], pool: Pool, cost: CostModel, scheduling: Scheduling
) -> OrderGain | None:
    """Simulate a shard whose answers have these `lengths`; None where it is too large for that, or nothing fits."""
    if not 0 < len(requests) <= MOST_SIMULATED:
        return None

    requests, refused, _ = fit_requests(requests, pool)
    workload = Workload.of(requests).without(refused)
    if not len(workload.tree):
        return None
    lengths = np.minimum(lengths, requests.max_tokens)

    def simulate(order: Policy) -> tuple[float, float]:
        loop = SimulatedLoop(lengths, cost)
        run_shard(workload, loop, pool, cost, replace(scheduling, order=order))
        cached = int(loop.log.cached_tokens[workload.tree.rows].sum(dtype=np.int64))
        return loop.seconds, cached / max(1, len(requests.tokens))

    (seconds, sharing), (input_order_seconds, _) = simulate(scheduling.order), simulate("input")
    return OrderGain(seconds, input_order_seconds, sharing)


def compare_drawn(
    requests: RequestBatch, lengths: LengthModel, pool: Pool, cost: CostModel, scheduling: Scheduling
) -> OrderGain | None:
    """Simulate a shard whose lengths are drawn from what is believed; of a small one the mean of several draws."""
    rng, everything = np.random.default_rng(scheduling.seed), np.arange(len(requests), dtype=np.int32)
    draws = min(_DRAWS, max(1, MOST_SIMULATED // max(1, len(requests))))
    found = [compare(requests, lengths.draw(everything, rng), pool, cost, scheduling) for _ in range(draws)]
    each = [astuple(gain) for gain in found if gain is not None]
    return OrderGain(*np.mean(each, axis=0).tolist()) if each else None


def _times_optimal(buys: OrderGain | None, optimal: float) -> float:
    """Divide the seconds of simulated steps by the optimal ones: 1 at least, and where nothing was simulated."""
    return max(1.0, buys.seconds / optimal) if buys and optimal > 0 else 1.0


def _optimal(tree: PrefixTree, lengths: NDArray[np.float64], pool: Pool, cost: CostModel) -> float:
    """Compute T_opt as it is if the answers have these lengths."""
    return cost.optimal_seconds(*work_of(tree, lengths, cost), pool.whole_tokens * cost.shape.kv_bytes_per_token)


def spread_rows(source: Dataset, rows: int) -> pa.Table:
    """Read about so many rows of an input, in runs of neighbours spread evenly over it."""
    runs = min(_RUNS, rows)
    each, starts = rows // runs, [source.num_rows * k // runs for k in range(runs)]
    with closing(source.reader()) as reader:
        return pa.concat_tables([reader.read(start, start + each) for start in starts])
