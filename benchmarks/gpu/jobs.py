"""Whole jobs: two mixes of the paper's kind, shortened, in every order and by every strategy.

Answers of the memory-heavy source are a sixteenth as long, so that a job ends in minutes; density and sharing are
solved for this card after that. The model has random weights, so every answer is as long as the trace says.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.stage import Stage
from gpu.steps import Kind, fit, run
from llmbatch.cost import OVERLAPPED, SEQUENTIAL
from llmbatch.driver import drive
from llmbatch.engines import Step
from llmbatch.engines.accelerated import AcceleratedEngine
from llmbatch.engines.profiling import pool_bytes
from llmbatch.hardware import Hardware
from llmbatch.kernels.triton_backend import TritonAttention
from llmbatch.mixes import MIXES, draw_mix
from llmbatch.requests import Requests
from llmbatch.runner import run_shard
from llmbatch.sampling import SamplingParams
from llmbatch.schedule import Finished
from llmbatch.simulate import run_workload
from llmbatch.traces import Trace, read_traces
from llmbatch.workload import Pool, Scheduling, Workload

SOURCES = ("azure2023_code", "mmlu_5shot", "video_panda70m")
SHORTER = 16
PAGE = 16
ORDERS = ("blend", "dfs", "random")


def measure(stage: Stage) -> dict[str, Any]:
    """Each mix in each order: seconds, what was predicted, and the share of the optimum under both laws."""
    hardware = calibrated(stage)
    pool = pool_of(stage)
    mixes = {}
    for name in ("table2-1", "table2-4"):
        trace = drawn(stage, name, hardware)
        requests = requests_of(trace, stage.sizes.model["vocab_size"])
        mixes[name] = {order: job(stage, requests, hardware, pool, order) for order in ORDERS}
    peak = 0 if stage.dry else torch.cuda.max_memory_allocated(stage.device)
    return {
        "compute_efficiency": hardware.compute_efficiency,
        "bandwidth_efficiency": hardware.bandwidth_efficiency,
        "pool_tokens": pool.tokens,
        "mixes": mixes,
        "peak_bytes": peak,
    }


def calibrated(stage: Stage) -> Hardware:
    """The card with the efficiencies of a few steps, taken now."""
    rows, keys, chunk = stage.sizes.rows, stage.sizes.step_keys, stage.sizes.chunk
    kinds = [Kind(rows, keys), Kind(2 * rows, keys), Kind(prefills=((0, chunk),)), Kind(rows, keys, ((0, chunk // 4),))]
    return fit(stage, kinds, [run(stage, kind)["seconds"] for kind in kinds])


def pool_of(stage: Stage) -> Pool:
    """What the largest step leaves."""
    if stage.dry:
        return Pool(600, PAGE)
    size = stage.shape.kv_bytes_per_token * PAGE
    left = pool_bytes(
        stage.loaded, TritonAttention(stage.device), tokens=8192, rows=stage.sizes.requests, page_size=PAGE
    )
    return Pool(int(left // size), PAGE)


def drawn(stage: Stage, name: str, hardware: Hardware) -> Trace:
    """A mix of so many rows. The dry run draws a few short rows that share nothing."""
    if stage.dry:
        rng = np.random.default_rng(0)
        count = stage.sizes.requests
        lengths = rng.integers(5, 40, count).astype(np.int32)
        zeros = np.zeros(count, np.int32)
        answers = rng.integers(1, stage.sizes.longest, count).astype(np.int32)
        offsets = np.zeros(count + 1, np.int64)
        return Trace(("made",), zeros, lengths, answers, np.empty(0, np.int32), offsets, PAGE)
    if stage.traces is None:
        raise SystemExit("jobs need the traces: --traces FOLDER, or $LLMBATCH_TRACES")
    traces = read_traces([Path(stage.traces) / f"{source}.parquet" for source in SOURCES])
    video = traces[2]
    traces[2] = replace(video, output_lengths=np.maximum(1, video.output_lengths // SHORTER).astype(np.int32))
    return draw_mix(traces, MIXES[name], stage.sizes.requests, stage.cost(hardware), seed=0).trace


def requests_of(trace: Trace, vocabulary: int) -> Requests:
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
    return Requests(
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


class Taken:
    """Takes answers, and counts."""

    def __init__(self, engine: AcceleratedEngine) -> None:
        self._engine = engine
        self.tokens = 0

    def before(self, step: Step) -> None:
        """Nothing."""

    def after(self, finished: Finished) -> NDArray[np.int32]:
        """Free the slots."""
        self.tokens += sum(len(self._engine.retire(slot)) for slot in finished.slots.tolist())
        return np.empty(0, np.int32)


def job(stage: Stage, requests: Requests, hardware: Hardware, pool: Pool, order: Any) -> dict[str, Any]:
    """One job, and the same by the simulator."""
    cost = stage.cost(hardware)
    scheduling = Scheduling(order=order, max_running=len(requests))
    workload = Workload.of(requests)
    forecast = run_workload(workload, requests.max_tokens, cost, pool, scheduling).report
    engine = AcceleratedEngine(
        stage.loaded, TritonAttention(stage.device), num_pages=pool.num_pages, page_size=pool.page_size
    )
    engine.begin(requests)
    taken = Taken(engine)
    begun = time.perf_counter()
    result = run_shard(workload, drive(engine, taken), pool, cost, scheduling)
    seconds = time.perf_counter() - begun
    assert taken.tokens == int(requests.max_tokens.sum()), "an answer is not as long as it was to be"
    pool_size = pool.tokens * cost.shape.kv_bytes_per_token
    p, d = requests.prompt_lengths, requests.max_tokens.astype(np.float64)
    tree = workload.tree
    shared = tree.total_tokens - tree.unique_tokens
    compute = float(cost.request_compute(p, d).sum() - cost.prompt_seconds(shared))
    memory = float(cost.request_memory(p, d, d * d).sum())
    optimal = {
        name: replace(cost, overlap=law).optimal_seconds(compute, memory, pool_size)
        for name, law in (("in_turn", SEQUENTIAL), ("overlapped", OVERLAPPED))
    }
    return {
        "seconds": seconds,
        "predicted_seconds": forecast.seconds,
        "steps": result.steps,
        "preemptions": result.preemptions,
        "tokens_per_second": (tree.total_tokens + taken.tokens) / seconds,
        "sharing": tree.sharing,
        "density": compute / memory,
        "share_of_optimum": {name: best / seconds for name, best in optimal.items()},
    }
