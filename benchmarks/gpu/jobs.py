"""Whole jobs: a mix of the paper's kind, shortened, in every order, under the best strategy.

Answers of the memory-heavy source are a sixteenth as long, so that a job ends in minutes; density and sharing are
solved for this card after that, and where a sharing cannot be reached the next that can is taken. The model has random
weights, so every answer is as long as the trace says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.harness.stage import Stage
from gpu.steps import efficiencies
from llmbatch.engine.calibration.memory_profile import measure_room
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.strategies import Strategy
from llmbatch.errors import ParameterError
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.cost import OVERLAPPED, SEQUENTIAL, CostModel
from llmbatch.perf_model.fit import MeasuredSteps, judge
from llmbatch.perf_model.work import Reach
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.order import Policy
from llmbatch.planning.workload import Pool, Scheduling, Workload
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.runtime.loops.pipelined_loop import drive
from llmbatch.runtime.protocols import EngineObserver
from llmbatch.runtime.shard_run import run_shard
from llmbatch.scheduler.output import Step
from llmbatch.scheduler.scheduler import FinishedSequences
from llmbatch.simulation.mix_draws import draw_mix
from llmbatch.simulation.mixes import MIXES, Mix
from llmbatch.simulation.simulator import run_workload
from llmbatch.simulation.traces import Trace, read_traces

SOURCES = ("azure2023_code", "mmlu_5shot", "video_panda70m")
SHORTER = 16


def measure(stage: Stage, name: str, orders: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The mix of that name: seconds, what was predicted, and the share of the optimum under both laws.

    An order such as `blend:2048` has so many tokens a step, where others decide that in closed loop.
    """
    best = stage.calibration.best
    yield "best_strategy", best
    calibrated = stage.calibration.fitted.items()
    yield "calibrated", {key: stage.constants(stage.cost(key)) | {"gain": fitted.gain} for key, fitted in calibrated}
    yield "isolated_efficiencies", efficiencies(stage)
    pool = pool_of(stage)
    yield "pool_tokens", pool.tokens
    trace, mix = drawn(stage, name, stage.cost(best))
    requests = requests_of(trace, stage.sizes.model["vocab_size"])
    yield "mix", {"density": mix.density, "sharing": mix.sharing, "rows": len(requests)}
    jobs: dict[str, Any] = {}
    for given in orders:
        order, _, tokens = given.partition(":")
        jobs[given] = job(stage, requests, best, pool, cast(Policy, order), step_tokens=int(tokens) if tokens else None)
        yield "orders", jobs
    yield "peak_bytes", 0 if stage.dry else torch.cuda.max_memory_allocated(stage.device)


def pool_of(stage: Stage) -> Pool:
    """What the largest step leaves, or less if a smaller pool is asked for. A dry run measures nothing."""
    most = stage.sizes.pool
    if stage.dry:
        assert most is not None, "a dry run has a pool of its own"
        return Pool(most, stage.page_size)
    size = stage.shape.kv_bytes_per_token * stage.page_size
    attention, rows = TritonAttention(stage.device), stage.sizes.requests
    mixed = stage.mixed_sizes
    room = measure_room(stage.loaded, attention, tokens=8192, rows=rows, mixed=mixed, page_size=stage.page_size)
    fits = int(room.pool_bytes // size)
    return Pool(fits if most is None else min(fits, most), stage.page_size)


def drawn(stage: Stage, name: str, cost: CostModel) -> tuple[Trace, Mix]:
    """A mix of so many rows, as it could be drawn. The dry run draws a few short rows that share nothing."""
    if stage.dry:
        rng = np.random.default_rng(0)
        count = stage.sizes.requests
        lengths = rng.integers(5, 40, count).astype(np.int32)
        zeros = np.zeros(count, np.int32)
        answers = rng.integers(1, stage.sizes.longest, count).astype(np.int32)
        offsets = np.zeros(count + 1, np.int64)
        return Trace(("made",), zeros, lengths, answers, np.empty(0, np.int32), offsets, stage.page_size), Mix(1, 0)
    if stage.traces is None:
        raise SystemExit("jobs need the traces: --traces FOLDER, or $LLMBATCH_TRACES")
    traces = read_traces([Path(stage.traces) / f"{source}.parquet" for source in SOURCES])
    video = traces[2]
    traces[2] = replace(video, output_lengths=np.maximum(1, video.output_lengths // SHORTER).astype(np.int32))
    mix = MIXES[name]
    while True:
        try:
            return draw_mix(traces, mix, stage.sizes.requests, cost, seed=0).trace, mix
        except ParameterError:
            if mix.sharing > MIXES[name].sharing + 0.1:
                raise
            mix = replace(mix, sharing=round(mix.sharing + 0.01, 2))


def requests_of(trace: Trace, vocabulary: int) -> RequestBatch:
    """Tokens that are equal where the trace says that prompts are, and random elsewhere."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(trace.prompt_lengths))).astype(np.int64)
    tokens = rng.integers(0, vocabulary, offsets[-1]).astype(np.int32)
    size = trace.block_size
    for i, (first, length) in enumerate(zip(offsets, trace.prompt_lengths)):
        blocks = trace.blocks[trace.offsets[i] : trace.offsets[i + 1]].astype(np.uint64)
        known = (
            (blocks[:, None] * np.uint64(size) + np.arange(size, dtype=np.uint64)).ravel()[:length].astype(np.uint64)
        )
        tokens[first : first + len(known)] = _scattered(known) % vocabulary
    count = len(trace)
    return RequestBatch(
        tokens=tokens,
        offsets=offsets,
        max_tokens=trace.output_lengths,
        params_index=np.zeros(count, np.int32),
        params=(SamplingParams(max_tokens=int(trace.output_lengths.max()), ignore_eos=True),),
        serial=np.arange(count, dtype=np.uint64),
        recorded=trace.output_lengths,
    )


def _scattered(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Numbers that look random, one for each."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    scattered: NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (scattered >> np.uint64(33)).astype(np.int64)


class Noted(EngineObserver[Any]):
    """Takes answers, and notes each step's work and when it was done."""

    def __init__(self, engine: GpuEngine, reach: Reach) -> None:
        self._engine = engine
        self._reach = reach
        self._work: list[tuple[float, ...]] = []
        self._done = [time.perf_counter()]
        self.tokens = 0

    def before_step(self, step: Step) -> None:
        """Note the step."""
        pairs, read = step.prefill_pairs(self._reach), step.read_tokens(self._reach)
        self._work.append((step.num_tokens, pairs, read, int(step.samples.sum())))

    def after_step(self, finished: FinishedSequences) -> NDArray[np.int32]:
        """Free the slots."""
        self._done.append(time.perf_counter())
        self.tokens += sum(len(self._engine.pop_tokens(slot)) for slot in finished.slots.tolist())
        return np.empty(0, np.int32)

    @property
    def steps(self) -> MeasuredSteps:
        """What each was, and took."""
        tokens, pairs, read, samples = np.array(self._work).T
        return MeasuredSteps(tokens, pairs, read, samples, np.diff(self._done))


def job(
    stage: Stage,
    requests: RequestBatch,
    strategy: Strategy,
    pool: Pool,
    order: Policy,
    *,
    step_tokens: int | None = None,
) -> dict[str, Any]:
    """One job, and the same by the simulator."""
    cost = stage.cost(strategy)
    reached = efficiencies(stage)  # before there are pages: a card has no room for both
    scheduling = Scheduling(order=order, step_tokens=step_tokens, max_running=len(requests))
    workload = Workload.of(requests)
    forecast = run_workload(workload, requests.max_tokens, cost, pool, scheduling).report
    engine = stage.engine(strategy, cost.rates, num_pages=pool.num_pages)
    engine.record(range(1, len(requests) + 1), stage.mixed_sizes, cost.rates)
    engine.begin(requests)
    noted = Noted(engine, cost.rates.reach)
    begun = time.perf_counter()
    result = run_shard(workload, drive(engine, noted), pool, cost, scheduling)
    seconds = time.perf_counter() - begun
    assert noted.tokens == int(requests.max_tokens.sum()), "an answer is not as long as it was to be"
    judged = judge(cost, noted.steps)
    tree = workload.tree
    return {
        "seconds": seconds,
        "predicted_seconds": forecast.seconds,
        "steps": result.steps,
        "steps_predicted_within_10_percent": judged.share_near,
        "preemptions": result.preemptions,
        "tokens_per_second": (tree.total_tokens + noted.tokens) / seconds,
        "sharing": tree.sharing,
        "share_of_optimum": {
            law: best / seconds for law, best in optima(stage, reached, workload, requests, pool).items()
        },
    }


def optima(
    stage: Stage, reached: Mapping[str, float], workload: Workload, requests: RequestBatch, pool: Pool
) -> dict[str, float]:
    """T_opt by the efficiencies of kernels alone: of an engine that runs them in turn, and of one that overlaps."""
    cost = stage.ceiling_cost
    hardware = replace(
        cost.hardware,
        compute_efficiency=reached["compute_efficiency"],
        bandwidth_efficiency=reached["bandwidth_efficiency"],
    )
    cost = replace(cost, hardware=hardware)
    p, d = requests.prompt_lengths, requests.max_tokens.astype(np.float64)
    tree = workload.tree
    compute = float(cost.request_compute(p, d).sum() - cost.saved_seconds(tree.lcp).sum())
    memory = float(cost.request_memory(p, d, d * d, tokens_together(tree, cost)).sum())
    pool_bytes = pool.tokens * cost.shape.kv_bytes_per_token
    laws = {"in_turn": replace(cost, overlap=SEQUENTIAL), "overlapped": replace(cost, law="bytes", overlap=OVERLAPPED)}
    return {name: law.optimal_seconds(compute, memory, pool_bytes) for name, law in laws.items()}
