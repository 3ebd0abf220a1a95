"""A trace through the scheduler that real engines run under, over an engine that is a clock.

What `llmbatch simulate` prints and writes: the seconds a device would need under a law of cost, the optimum of that
law, and a row for each step and each request from which both can be computed again.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ParameterError
from llmbatch.figures import Figures, seconds_in_words
from llmbatch.kernels.work_items import LOOK_BACK
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import RESERVED
from llmbatch.perf_model.work import weights_read
from llmbatch.planning.plan import Plan
from llmbatch.planning.workload import ROW_TOKENS, Fit, Pool, Scheduling, Workload, check_simulated_pool, work_of
from llmbatch.runtime.loops.simulated_loop import STEP, SimulatedLoop
from llmbatch.runtime.shard_run import run_shard
from llmbatch.simulation.options import PAGE_SIZE
from llmbatch.simulation.options import Knowledge as Knowledge
from llmbatch.simulation.traces import Trace

MAX_RUNNING = 8192
_CONTEXT = 131_072  # tokens: the longest answer that the scheduler must reckon with where lengths are not known
_WINDOWS = 8  # the most that a row of a trace is taken to hold

SIDES = ("left", "right")


@dataclass(frozen=True, kw_only=True)
class SimulationReport(Figures):
    """The figures of a simulation. Times in seconds; requests whose prompt cannot fit count nowhere but in errors."""

    order: str
    requests: int
    errors: int
    cut: int  # answers that end early, where the pool is full of them alone
    prompt_tokens: int
    output_tokens: int
    seconds: float
    optimal_seconds: float
    fraction_of_optimal: float
    tokens_per_second: float
    prefix_sharing: float
    prefix_sharing_optimal: float
    steps: int
    preemptions: int
    peak_kv_fraction: float
    critical_path_seconds: float  # the longest row's output tokens at the speed of reading the weights that it needs
    planning_seconds: float  # real ones: from columns in memory to the order ready
    scheduling_seconds: float  # real ones: all time in schedule and pages
    replica_seconds: tuple[float, ...] = ()  # of each replica, where there are several

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {**asdict(self), "replica_seconds": list(self.replica_seconds)}

    def _in_words(self) -> list[tuple[str, str]]:
        """Say each figure in words, by its name."""
        said = [
            (
                "requests",
                f"{self.requests:,} ({self.errors:,} can never fit, {self.cut:,} end early), "
                f"{self.prompt_tokens:,} prompt and {self.output_tokens:,} output tokens",
            ),
            (
                "seconds",
                f"{self.seconds:,.1f} in order {self.order}, {self.fraction_of_optimal:.1%} of the optimum "
                f"({self.optimal_seconds:,.1f}); {self.tokens_per_second:,.0f} tokens/s",
            ),
            ("prefix sharing", f"{self.prefix_sharing:.1%} of {self.prefix_sharing_optimal:.1%} possible"),
            (
                "steps",
                f"{self.steps:,}, {self.preemptions:,} preemptions, at most {self.peak_kv_fraction:.1%} of the KV "
                "memory used",
            ),
            ("longest row", f"{seconds_in_words(self.critical_path_seconds)} s at the speed of reading the weights"),
            ("took", f"{self.planning_seconds:.2f} s to plan, {self.scheduling_seconds:.2f} s to schedule"),
        ]
        if self.replica_seconds:
            said.append(("replicas", f"{', '.join(f'{seconds:,.1f}' for seconds in self.replica_seconds)} s"))
        return said


SimulationReport.__module__ = "llmbatch"  # which it is imported from


@dataclass(frozen=True, slots=True)
class Simulation:
    """A report, a row a step (of `STEP`), and columns with a value a request."""

    report: SimulationReport
    steps: NDArray[Any]
    requests: dict[str, NDArray[np.int32]]
    step_shards: NDArray[np.int32] | None = None  # the replica of each step, where there are several

    def steps_table(self) -> pa.Table:
        """Return the steps as a table."""
        shards = {} if self.step_shards is None else {"shard": self.step_shards}
        return pa.table({name: self.steps[name] for name in STEP.names or ()} | shards)

    def requests_table(self) -> pa.Table:
        """Return the requests as a table, in input order; null where a request can never fit."""
        missing = self.requests["finished_step"] < 0
        columns: dict[str, Any] = {"row": np.arange(len(missing), dtype=np.int32)}
        columns |= {name: pa.array(values, mask=missing) for name, values in self.requests.items()}
        columns["side"] = pa.DictionaryArray.from_arrays(columns["side"], pa.array(SIDES)).cast(pa.string())
        return pa.table(columns)


def no_room(cost: CostModel) -> str:
    """Say that a model's weights leave no room on a device."""
    weights, memory = cost.shape.weight_bytes / 1e9, cost.hardware.memory / 1e9
    return f"weights of {weights:.1f} GB leave no room for KV in {memory:.0f} GB of {cost.hardware.name}"


def pool_of(cost: CostModel, kv_memory: float | None, page_size: int = PAGE_SIZE) -> Pool:
    """Return the pages of `kv_memory` bytes; by default what a device has beside the weights and 4 GB a card.

    Raises ParameterError where the model does not fit, or a pool is asked for that no node has.
    """
    shape, hardware = cost.shape, cost.hardware
    memory = hardware.memory - hardware.cards * RESERVED - shape.weight_bytes if kv_memory is None else kv_memory
    pages = int(memory / shape.kv_bytes_per_token) // page_size
    if kv_memory is not None:
        check_simulated_pool(Pool(pages, page_size), shape.kv_bytes_per_token)
    if pages < 1:
        raise ParameterError(
            f"the model must fit the device: {no_room(cost)}; use more cards (--tensor-parallel) or a larger one"
            if kv_memory is None
            else f"kv_memory must hold at least one page of {page_size} tokens, "
            f"{page_size * shape.kv_bytes_per_token:,.0f} bytes, got {kv_memory:,.0f}"
        )
    windowed = [window for window in shape.windows if window]
    window = max(windowed) + LOOK_BACK if windowed else 0
    return Pool.of(
        memory,
        page_size,
        shape.kv_bytes_per_token,
        window_bytes=shape.kv_bytes_per_token * len(windowed) / shape.layers,
        window=window,
        most=max(ROW_TOKENS, _WINDOWS * window),
    )


def describe(trace: Trace, pool: Pool, lengths: Knowledge, max_tokens: int | None = None) -> Workload:
    """Return a trace as a workload: the rows whose prompts fit the pool, their lengths known or not.

    `max_tokens` is the cap that users give; without one, answers may be as long as pool and context allow.
    """
    output = trace.output_lengths
    known = lengths == "known"
    most = output if known else np.full(len(output), max_tokens or _CONTEXT, np.int32)
    fit = Fit.of(trace.prompt_lengths, most, pool)
    workload = Workload(
        tree=trace.tree(),
        max_tokens=fit.max_tokens,
        keys=np.zeros(len(output), np.int32),
        known=fit.max_tokens if known else np.zeros(len(output), np.int32),
    )
    return workload.without(np.flatnonzero(fit.refused).tolist())


def run_workload(
    workload: Workload,
    output: NDArray[np.int32],
    cost: CostModel,
    pool: Pool,
    scheduling: Scheduling,
    *,
    planning: float = 0.0,
    plan: Plan | None = None,
) -> Simulation:
    """Run the rows of a workload's tree, which generate `output` int32 tokens each, or max_tokens if that is less.

    A `plan` that is given is kept; `planning` seconds were spent before.
    """
    tree = workload.tree
    generated = np.minimum(output, workload.max_tokens)
    loop = SimulatedLoop(generated, cost)
    begun = time.perf_counter()
    result = run_shard(workload, loop, pool, cost, scheduling, plan=plan)
    scheduling_seconds = time.perf_counter() - begun - result.planning_seconds
    log = loop.log
    steps = log.steps[: log.counts[0].steps]
    requests = {
        "admitted_step": log.admitted_step,
        "finished_step": log.finished_step,
        "prefilled_tokens": tree.lengths - log.cached_tokens,
        "cached_tokens": log.cached_tokens,
        "decoded_tokens": generated - 1,
        "recomputed_tokens": log.recomputed_tokens,
        "preemptions": log.preemptions,
        "side": log.side,
    }
    report = report_of(
        workload, output, cost, pool, steps, requests,
        order=scheduling.order,
        seconds=loop.seconds,
        peak_kv_fraction=peak_kv(steps, pool),
        planning_seconds=planning + result.planning_seconds,
        scheduling_seconds=scheduling_seconds,
    )  # fmt: skip  # arguments in groups
    return Simulation(report, steps, requests)


def peak_kv(steps: NDArray[Any], pool: Pool) -> float:
    """Return the largest part of a pool that is used in any step."""
    return int(steps["kv_used_tokens"].max(initial=0)) / pool.tokens


def report_of(
    workload: Workload,
    output: NDArray[np.int32],
    cost: CostModel,
    pool: Pool,
    steps: NDArray[Any],
    requests: dict[str, NDArray[np.int32]],
    *,
    replicas: int = 1,
    seconds: float,
    **given: Any,
) -> SimulationReport:
    """Count the figures of a run, of one engine or of `replicas`.

    The optimum of devices that can join is that of all of them as one, whatever they say to each other.
    """
    tree = workload.tree
    rows = tree.rows
    prompts = tree.lengths[rows].astype(np.int64)
    generated = np.minimum(output, workload.max_tokens)
    answers = generated[rows].astype(np.int64)
    compute, memory = work_of(tree, generated.astype(np.float64), cost)
    joined = 1 if cost.hardware.link is None else replicas
    pool_bytes = joined * pool.whole_tokens * cost.shape.kv_bytes_per_token
    optimal = cost.optimal_seconds(compute / replicas, memory / replicas, pool_bytes)
    prompt_tokens = int(prompts.sum())
    return SimulationReport(
        requests=len(output),
        errors=len(output) - len(rows),
        cut=int(np.count_nonzero(output[rows] > answers)),
        prompt_tokens=prompt_tokens,
        output_tokens=int(answers.sum()),
        seconds=seconds,
        optimal_seconds=optimal,
        fraction_of_optimal=optimal / seconds if seconds else 1.0,
        tokens_per_second=(prompt_tokens + int(answers.sum())) / seconds if seconds else 0.0,
        prefix_sharing=int(requests["cached_tokens"][rows].sum(dtype=np.int64)) / max(1, prompt_tokens),
        prefix_sharing_optimal=tree.sharing,
        steps=len(steps),
        preemptions=int(steps["preempted"].sum()),
        critical_path_seconds=int(answers.max(initial=0)) * float(as_python(weights_read)(cost.rates, 1.0)),
        **given,
    )
