"""The best of the ways to lay a model on devices (`llmbatch.simulation.splits`), found by bounds and by the clock.

No split ends before its bound: the optimum of its copies, each with its share of the work (BlendServe 2.4); the
longest row at the speed of reading the weights on all devices that may join at the end; and the steps that it needs
at least, each with a read of the weights. A step decodes no more rows than may be in flight, and KV memory holds no
more tokens of answers than it has room for. Of experts a step reads those alone that its decodes are sent to.

Splits are taken in the order of their bounds and simulated, until the next bound is worse than the two best that were
simulated. So the best and the runner-up are those of all splits, and few are simulated. Of more than `MOST_SIMULATED`
rows, and of a job of which some rows were read, a sample is simulated on one copy. What more rows add is what the
second half of the sample adds: the end of a job comes once. Bounds alone would not do: where a copy has little room
for KV a job takes many times as long.

What is better costs less, where offers have a price, else it ends sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from llmbatch.choices import KVPlace
from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ParameterError
from llmbatch.figures import seconds_in_words
from llmbatch.kvcache.contents import Prompts
from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.work import weights_read
from llmbatch.planning.workload import Fit, Scheduling, Workload, split_for, work_of
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.simulation.replicas import simulate_workload
from llmbatch.simulation.splits import Split

MOST_SIMULATED: Final = 20_000  # rows; simulating more takes longer than a forecast may
_SAMPLED: Final = 2_000  # rows of a larger job, for each split
_ON_DEVICES: Final = 2048  # rows in flight of a copy, as jobs on a GPU have by default


@dataclass(frozen=True, kw_only=True)
class SearchedSplit:
    """A split, and what a job would take on it."""

    device: str
    tensor_parallel: int
    data_parallel: int
    weights: Literal["resident", "host"]  # host: they come from its memory
    kv: KVPlace  # host: it holds keys and values, and attends
    seconds: float | None  # simulated, of a large job by a sample; None where its bound was enough
    seconds_least: float  # by the bound
    dollars: float | None  # of these seconds, simulated or least; None without a price
    binding: str  # "compute", "memory", "weights" or "longest row"

    @property
    def in_words(self) -> str:
        """The split in a line."""
        copies = f"{self.data_parallel} x " if self.data_parallel > 1 else ""
        least = f"at least {seconds_in_words(self.seconds_least)} s"
        seconds = least if self.seconds is None else f"{seconds_in_words(self.seconds)} s"
        cents = "" if self.dollars is None else f"{self.dollars:,.2f}" if self.dollars >= 0.01 else "less than 0.01"
        dollars = cents and f", {cents} dollars"
        held = "weights, keys and values" if self.kv == "host" else "weights"
        weights = f" with {held} in the host's memory" if self.weights == "host" else ""
        return f"{copies}{self.tensor_parallel} {self.device}{weights}: {seconds}{dollars}, bound by {self.binding}"


@dataclass(frozen=True, slots=True)
class _Bound:
    """What a split takes at least."""

    split: Split
    seconds: float
    binding: str


def search(
    workload: Workload,
    output: NDArray[np.int32],
    splits: Sequence[Split],
    scheduling: Scheduling,
    *,
    times: float = 1.0,
) -> tuple[SearchedSplit, ...]:
    """Search for the best split, and return all of them: those that were simulated first, the best before others.

    Rows answer `output` int32 [rows] tokens, which the scheduler does not know. The job has `times` as many rows as the
    workload, of which it is a sample. A split whose copy has no room for a row is left out. Raises ParameterError where
    none is left.
    """
    bounds = [
        _bound_of(workload, output, split, scheduling, times) for split in splits if _holds(split, workload, output)
    ]
    if not bounds:
        raise ParameterError(
            "devices must hold the longest row, and none of those offered do: lower max_tokens (--max-tokens), or "
            "offer more or larger devices"
        )

    def worth(split: Split, seconds: float) -> float:
        dollars = split.dollars(seconds)
        return seconds if dollars is None else dollars

    bounds.sort(key=lambda one: worth(one.split, one.seconds))
    simulated: list[tuple[float, SearchedSplit]] = []
    rest: list[SearchedSplit] = []
    whole = times == 1.0 and len(workload.tree) <= MOST_SIMULATED
    for bound in bounds:
        split = bound.split
        enough = len(simulated) > 1 and worth(split, bound.seconds) >= sorted(best for best, _ in simulated)[1]
        if len(workload.tree) and not enough:
            if whole:
                seconds = _simulated(workload, output, split, scheduling, copies=split.data_parallel)
            else:
                seconds = max(bound.seconds, _by_sample(workload, output, split, scheduling, times))
            simulated.append((worth(split, seconds), _told(bound, seconds)))
        else:
            rest.append(_told(bound, None))
    simulated.sort(key=lambda one: one[0])
    return (*(split for _, split in simulated), *rest)


def search_requests(
    requests: RequestBatch, splits: Sequence[Split], scheduling: Scheduling, *, times: float
) -> tuple[SearchedSplit, ...]:
    """Search for the best split for requests (`search`), whose lengths are drawn from what is believed."""
    workload = Workload.of(requests)
    rng, everything = np.random.default_rng(scheduling.seed), np.arange(len(requests), dtype=np.int32)
    drawn = np.minimum(workload.length_model().draw(everything, rng), requests.max_tokens).astype(np.int32)
    return search(workload, drawn, splits, replace(scheduling, max_running=_ON_DEVICES), times=times)


def _holds(split: Split, workload: Workload, output: NDArray[np.int32]) -> bool:
    """Tell whether a copy has room for each row by itself, to the end of its answer."""
    rows = workload.tree.rows
    longest = workload.tree.lengths[rows] + np.minimum(output, workload.max_tokens)[rows]
    return int(longest.max(initial=0)) <= split.pool.tokens


def _told(bound: _Bound, seconds: float | None) -> SearchedSplit:
    split = bound.split
    return SearchedSplit(
        device=split.offer.hardware.name,
        tensor_parallel=split.tensor_parallel,
        data_parallel=split.data_parallel,
        weights=split.weights,
        kv=split.kv,
        seconds=seconds,
        seconds_least=bound.seconds,
        dollars=split.dollars(bound.seconds if seconds is None else seconds),
        binding=bound.binding,
    )


def _bound_of(
    workload: Workload, output: NDArray[np.int32], split: Split, scheduling: Scheduling, times: float
) -> _Bound:
    """Bound a split: the optimum of its copies, the longest row, and the reads of the weights."""
    cost, share = split.cost, times / split.data_parallel
    answers = np.minimum(output, workload.max_tokens).astype(np.float64)
    compute, memory = (seconds * share for seconds in work_of(workload.tree, answers, cost))
    optimal = cost.optimal_seconds(compute, memory, split.pool.whole_tokens * cost.shape.kv_bytes_per_token)
    every = on_joined(cost, split.data_parallel) if cost.hardware.link is not None else cost
    decoded = answers[workload.tree.rows] - 1.0  # by decodes: the last step of a prompt samples a token
    most, running = float(decoded.max(initial=0.0)), split.scheduling(scheduling).max_running
    longest = most * as_python(weights_read)(every.rates, 1.0)
    in_flight = float(decoded.sum()) / running * as_python(weights_read)(cost.rates, float(running))
    # So many decodes at least fill a pool; a step that holds less reads more for each token that it holds.
    fewest = split.pool.tokens / max(1.0, most)
    held = float((decoded * decoded).sum()) / 2.0
    in_pages = held / split.pool.tokens * as_python(weights_read)(every.rates, fewest)
    reads = share * max(in_flight, in_pages)
    of_work = "compute" if compute > memory else "memory"
    bounds = ((optimal, of_work), (reads, "weights"), (longest, "longest row"))
    return _Bound(split, *max(bounds, key=lambda bound: bound[0]))


def _by_sample(
    workload: Workload, output: NDArray[np.int32], split: Split, scheduling: Scheduling, times: float
) -> float:
    """Return the seconds of a copy's part of a job by the clock, which has `times` as many rows as the workload.

    They are those of a sample, and of more rows like its second half.
    """

    def of_rows(count: int) -> float:
        kept = np.zeros(len(workload), np.bool_)
        kept[workload.tree.rows[np.linspace(0, len(workload.tree) - 1, count).astype(np.int64)]] = True
        sample = replace(workload, tree=workload.tree.select(kept))
        return _simulated(sample, output, split, scheduling, copies=1)

    rows = max(1.0, times * len(workload.tree) / split.data_parallel)
    most = min(_SAMPLED, len(workload.tree))
    if rows <= most:
        return of_rows(round(rows))
    seconds = of_rows(most)
    more = rows - most
    return seconds + max(0.0, seconds - of_rows(most // 2)) * more / (most - most // 2) if most > 1 else seconds * rows


def _simulated(
    workload: Workload, output: NDArray[np.int32], split: Split, scheduling: Scheduling, *, copies: int
) -> float:
    """Return the seconds of a split by the clock, of which no more copies run than there are rows."""
    most = Fit.of(workload.tree.lengths, workload.max_tokens, split.pool).max_tokens
    known = np.minimum(workload.known, most)
    fitted = replace(workload, max_tokens=most, known=known, prompts=Prompts.nothing())  # pages are found by the tree
    longest = (workload.tree.lengths + most)[workload.tree.rows].astype(np.int64)
    pages = int((longest // split.pool.page_size + 2).sum())  # that all rows take at once
    found = simulate_workload(
        fitted,
        output,
        split.cost,
        split_for(split.pool, fitted).at_most(pages),
        split.scheduling(scheduling),
        replicas=min(copies, len(workload.tree)),
        known=False,
    )
    return found.report.seconds
