"""Whole steps of every kind under each strategy: what they take, against the roofline and what is predicted of them.

Two rooflines. The lower one is that of any engine: the longer of all arithmetic and all bytes. The other is that of an
engine that runs kernel after kernel: products take the longer of their arithmetic and the weights' bytes, attention of
decodes its KV's, and they add up. Every other step is used to fit; the others are what predictions are judged by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from gpu.harness.stage import Stage
from gpu.kernels import ALONE, decodes
from llmbatch.engine.calibration.step_timer import StepKind, measured, time_step
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.strategies import STRATEGIES
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel, Overlap
from llmbatch.perf_model.fit import calibrate, judge, predict

_SHARE = 0.65  # of the card's memory, for pages: the weights and a step's own memory need the rest


def kinds(stage: Stage) -> list[StepKind]:
    """Pure decodes, pure prefills, and both; one or two of each in a dry run."""
    rows, keys, chunk = stage.sizes.rows, stage.sizes.step_keys, stage.sizes.chunk
    if stage.dry:
        return stage.few_kinds
    most = int(_SHARE * stage.ceilings.memory / stage.shape.kv_bytes_per_token) // stage.page_size
    decodes = [StepKind(n, k) for n in (rows // 4, rows, 2 * rows) for k in (keys // 4, keys, 2 * keys)]
    prefills = [StepKind(prefills=((before, chunk // part),)) for part in (8, 2, 1) for before in (0, chunk)]
    prefills += [StepKind(prefills=((0, chunk // 8),) * 8)]
    blends = [StepKind(n, keys, ((0, chunk // part),)) for n in (rows // 4, rows, 2 * rows) for part in (8, 4, 1)]
    return [kind for kind in (*decodes, *prefills, *blends) if kind.pages(stage.page_size) <= most]


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Seconds of each kind under each strategy; what a fit to half of them says of the others; where time goes."""
    every = kinds(stage)
    most = max(kind.pages(stage.page_size) for kind in every)
    seconds: dict[str, list[float]] = {}
    profiles: dict[str, Any] = {}
    rows, keys, chunk = stage.sizes.rows, stage.sizes.step_keys, stage.sizes.chunk
    rates = stage.ceiling_cost.rates
    for name in STRATEGIES:
        engine = stage.engine(name, rates, num_pages=most)
        engine.pages.fill()
        engine.record((kind.decodes for kind in every if not kind.prefills), stage.mixed_sizes, rates)
        seconds[name] = [time_step(engine, kind, runs=stage.sizes.runs)[1] for kind in every]
        yield "seconds", seconds
        profiles[name] = overlapped(stage, engine, StepKind(rows, keys, ((0, chunk // 4),)))
        yield "profiles", profiles
        del engine
    yield from judged_steps(stage, every, seconds)


def judged_steps(stage: Stage, every: list[StepKind], seconds: dict[str, list[float]]) -> Iterator[tuple[str, Any]]:
    """What the steps are against their bounds, and what a fit to half of them says of the others."""
    in_turn, reach = seconds["sequential"], stage.ceiling_cost.rates.reach
    fitted = calibrate(replace(stage.ceiling_cost, overlap=SEQUENTIAL), measured(every[::2], in_turn[::2], reach))
    judged = judge(fitted.cost, measured(every[1::2], in_turn[1::2], reach))
    steps = measured(every, in_turn, reach)
    least, kernels = predict(any_engine(stage), steps), predict(stage.ceiling_cost, steps)
    predicted = predict(fitted.cost, steps)
    yield (
        "steps",
        [
            {
                "decodes": kind.decodes,
                "keys": kind.keys,
                "prefills": kind.prefills,
                "seconds": {name: times[i] for name, times in seconds.items()},
                "roofline": least[i],
                "roofline_of_kernels": kernels[i],
                "predicted": predicted[i],
            }
            for i, kind in enumerate(every)
        ],
    )
    yield "fitted", stage.constants(fitted.cost)
    yield "predicted_within_10_percent", judged.share_near
    yield "largest_miss", judged.largest_miss
    sizes = stage.sizes
    decode = every.index(StepKind(sizes.rows, sizes.step_keys))
    prefill = every.index(StepKind(prefills=((0, sizes.chunk),)))
    yield "decode_over_roofline", in_turn[decode] / least[decode]
    yield "decode_over_roofline_of_kernels", in_turn[decode] / kernels[decode]
    yield "prefill_share_of_rate", least[prefill] / in_turn[prefill]


def any_engine(stage: Stage) -> CostModel:
    """The longer of all arithmetic and all bytes, at the ceilings."""
    return replace(stage.ceiling_cost, law="bytes", overlap=Overlap(float("inf")))


@cache
def efficiencies(stage: Stage) -> dict[str, float]:
    """What kernels alone reach of the ceilings: a chunk's products and attention, and decodes' attention."""
    kind = StepKind(prefills=((0, stage.sizes.chunk),))
    engine = stage.engine("sequential", stage.ceiling_cost.rates, num_pages=kind.pages(stage.page_size))
    engine.pages.fill()
    took = time_step(engine, kind, runs=stage.sizes.runs)[1]
    least = float(predict(any_engine(stage), measured([kind], [took], stage.ceiling_cost.rates.reach))[0])
    decoded = decodes(stage, np.full(stage.sizes.rows, stage.sizes.keys), 0, together=ALONE)
    return {
        "compute_efficiency": min(1.0, least / took),
        "bandwidth_efficiency": min(1.0, decoded["share_of_bandwidth"]),
    }


def overlapped(stage: Stage, engine: GpuEngine, kind: StepKind) -> dict[str, Any]:
    """Where the time of a blended step goes: kernels by name, and how much of it two of them ran at once."""
    if stage.dry:
        return {}
    engine.begin(kind.requests(engine.vocabulary))
    step = kind.step(stage.page_size)
    engine.execute(step)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.execute(step)
        torch.cuda.synchronize(stage.device)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    )
    busy, end = 0.0, 0.0
    by_name: dict[str, float] = {}
    for begun, ended, name in spans:
        busy += max(0.0, ended - max(begun, end))
        end = max(end, ended)
        by_name[name] = by_name.get(name, 0.0) + ended - begun
    total = sum(by_name.values())
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "span_us": end - spans[0][0],
        "busy_us": busy,
        "kernels_us": total,
        "at_once_us": total - busy,
        "longest_us": {name[:80]: took for name, took in longest},
        "spans": [(begun - spans[0][0], ended - spans[0][0], name[:40]) for begun, ended, name in spans[:200]],
    }
