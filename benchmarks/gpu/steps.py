"""Whole steps of every kind: how long they take, against the roofline and against what is predicted of them.

Every other step is used to fit the two efficiencies (`fit`); the others are what predictions are judged by.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.stage import Stage
from llmbatch.engines import Step
from llmbatch.engines.accelerated import AcceleratedEngine
from llmbatch.hardware import Hardware
from llmbatch.kernels.triton_backend import TritonAttention
from llmbatch.requests import Requests
from llmbatch.sampling import SamplingParams

PAGE = 16


@dataclass(frozen=True)
class Kind:
    """A step: so many decodes over so many keys each, and prefills of so many tokens after as many others."""

    decodes: int = 0
    keys: int = 0
    prefills: tuple[tuple[int, int], ...] = ()  # (tokens before, tokens)

    @cached_property
    def starts(self) -> NDArray[np.int32]:
        return np.array([self.keys - 1] * self.decodes + [before for before, _ in self.prefills], np.int32)

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        return np.array([1] * self.decodes + [tokens for _, tokens in self.prefills], np.int32)

    def predicted(self, stage: Stage, hardware: Hardware) -> float:
        """Seconds by the cost model."""
        pairs = sum(tokens * before + tokens * (tokens + 1) / 2 for before, tokens in self.prefills)
        cost = stage.cost(hardware)
        compute, memory = cost.step(int(self.counts.sum()), pairs, self.decodes * self.keys, len(self.counts))
        return float(cost.overlap(compute, memory))


def kinds(stage: Stage) -> list[Kind]:
    """Pure decodes, pure prefills, and both."""
    rows, keys, chunk = stage.sizes.rows, stage.sizes.step_keys, stage.sizes.chunk
    decodes = [Kind(n, k) for n in (rows // 4, rows, 2 * rows) for k in (keys // 4, keys, 2 * keys)]
    prefills = [Kind(prefills=((before, chunk // part),)) for part in (8, 2, 1) for before in (0, chunk)]
    prefills += [Kind(prefills=((0, chunk // 8),) * 8)]
    mixed = [Kind(n, keys, ((0, chunk // part),)) for n in (rows // 4, rows, 2 * rows) for part in (8, 4, 1)]
    return [*decodes, *prefills, *mixed]


def measure(stage: Stage) -> dict[str, Any]:
    """Seconds of each kind; the efficiencies; how many of those that were not fitted are predicted within 10 %."""
    every = kinds(stage)
    seconds = [run(stage, kind)["seconds"] for kind in every]
    fitted = fit(stage, every[::2], seconds[::2])
    rows = []
    for kind, took in zip(every, seconds, strict=True):
        rows.append(
            {
                "decodes": kind.decodes, "keys": kind.keys, "prefills": kind.prefills, "seconds": took,
                "roofline": kind.predicted(stage, ideal(stage)), "predicted": kind.predicted(stage, fitted),
            }
        )  # fmt: skip
    misses = [abs(kind.predicted(stage, fitted) / took - 1.0) for kind, took in zip(every, seconds)]
    judged = misses[1::2]
    decode, chunk = Kind(stage.sizes.rows, stage.sizes.step_keys), Kind(prefills=((0, stage.sizes.chunk),))
    products = stage.cost(ideal(stage)).step(stage.sizes.chunk, stage.sizes.chunk**2 / 2, 0, 1).compute
    return {
        "steps": rows,
        "compute_efficiency": fitted.compute_efficiency,
        "bandwidth_efficiency": fitted.bandwidth_efficiency,
        "predicted_within_10_percent": sum(miss <= 0.1 for miss in judged) / len(judged),
        "decode_over_roofline": seconds[every.index(decode)] / decode.predicted(stage, ideal(stage)),
        "prefill_share_of_rate": products / seconds[every.index(chunk)],
    }


def ideal(stage: Stage) -> Hardware:
    """The card at its ceilings."""
    return replace(stage.ceilings, compute_efficiency=1.0, bandwidth_efficiency=1.0)


def fit(stage: Stage, kinds: list[Kind], seconds: list[float]) -> Hardware:
    """The card with the efficiencies that predict these steps best: least squares of relative errors."""
    cost = stage.cost(ideal(stage))
    parts = []
    for kind in kinds:
        pairs = sum(tokens * before + tokens * (tokens + 1) / 2 for before, tokens in kind.prefills)
        parts.append(cost.step(int(kind.counts.sum()), pairs, kind.decodes * kind.keys, len(kind.counts)))
    took = np.array(seconds)
    columns = np.array([[part.compute, part.memory] for part in parts]) / took[:, None]
    slopes = np.linalg.lstsq(columns, np.ones(len(took)), rcond=None)[0]
    efficiencies = np.clip(1.0 / np.maximum(slopes, 1e-9), 0.01, 1.0)
    return replace(
        stage.ceilings, compute_efficiency=float(efficiencies[0]), bandwidth_efficiency=float(efficiencies[1])
    )


def run(stage: Stage, kind: Kind) -> dict[str, float]:
    """Seconds of a step as an engine takes it, the next one prepared while it is computed."""
    rows = len(kind.starts)
    lengths = kind.starts + kind.counts
    blocks = -(-(lengths + 1) // PAGE)
    ends = np.cumsum(blocks)
    tables = np.zeros((rows, int(blocks.max())), np.int32)
    for row, first, end in zip(tables, ends - blocks, ends, strict=True):
        row[: end - first] = np.arange(first, end)
    zeros = np.zeros(rows, np.int32)
    vocabulary = stage.sizes.model["vocab_size"]
    requests = Requests(
        tokens=np.random.default_rng(0).integers(0, vocabulary, int(lengths.sum())).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=zeros + 10_000,
        params_index=zeros,
        params=(SamplingParams(max_tokens=10_000, ignore_eos=True),),
        serial=np.arange(rows, dtype=np.uint64),
        recorded=zeros + 10_000,
    )
    engine = AcceleratedEngine(stage.loaded, TritonAttention(stage.device), num_pages=int(ends[-1]), page_size=PAGE)
    engine.begin(requests)
    slots = np.arange(rows, dtype=np.int32)
    step = Step(0, kind.decodes, slots, slots, kind.starts, kind.counts, np.ones(rows, np.bool_), tables)
    times = []
    runs = stage.sizes.runs
    for _ in range(3):
        engine.execute(step)
        if not stage.dry:
            torch.cuda.synchronize(stage.device)
        begun = time.perf_counter()
        engine.submit(step)
        for _ in range(runs - 1):
            engine.submit(step)
            engine.collect()
        engine.collect()
        times.append((time.perf_counter() - begun) / runs)
    return {"seconds": statistics.median(times), "least": min(times), "most": max(times)}
