"""The measured cost of a model on a device under each execution strategy.

Some fifteen steps of every kind are timed under each strategy, in seconds altogether, and the cost model is fitted to
them (`llmbatch.perf_model.fit`). Blends of decodes and prefills show which strategy is the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from llmbatch.engine.calibration.step_timer import StepKind, measured, median_step
from llmbatch.engine.calibration.store import DeviceCalibration, FittedStrategy
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.mixed import mixed_sizes
from llmbatch.engine.gpu.strategies import STRATEGIES, Strategy
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel, Overlap
from llmbatch.perf_model.fit import calibrate
from llmbatch.perf_model.work import Rates

_ROWS: Final = 256
_START: Final = Overlap(2.0)  # of strategies that overlap, from where their law is fitted
_RUNS: Final = 4


def step_kinds(tokens: int) -> list[StepKind]:
    """Choose decodes, prefills, and blends of both, whose pages hold at most `tokens` tokens."""
    keys = max(1, min(1024, tokens // (2 * _ROWS)))
    chunk = max(8, min(4096, tokens // 4))
    decodes = [StepKind(rows, keys) for rows in (_ROWS // 8, _ROWS // 2, _ROWS)] + [StepKind(_ROWS, -(-keys // 4))]
    prefills = [StepKind(prefills=((before, chunk // part),)) for part, before in ((8, 0), (2, 0), (1, 0), (2, chunk))]
    sizes = (
        (_ROWS, 16, 0),
        (_ROWS, 8, 0),
        (_ROWS, 4, 0),
        (_ROWS, 2, 0),
        (_ROWS, 1, 0),
        (_ROWS // 2, 4, chunk),
        (_ROWS // 2, 2, 0),
        (_ROWS // 4, 2, 0),
    )
    blends = [StepKind(rows, keys, ((before, max(1, chunk // part)),)) for rows, part, before in sizes]
    return [*decodes, *prefills, *blends]


def calibrate_device(
    ceilings: CostModel, kinds: Sequence[StepKind], new_engine: Callable[[Strategy, Rates], GpuEngine]
) -> DeviceCalibration:
    """Time the steps under each strategy, and fit it. `ceilings` are the device's; some kinds are blends."""
    fitted: dict[Strategy, FittedStrategy] = {}
    rates, sequential = ceilings.rates, list[float]()
    mixed = mixed_sizes(ceilings.shape.layers, rates)
    blends = [i for i, kind in enumerate(kinds) if kind.decodes and kind.prefills]
    for name in STRATEGIES:
        engine = new_engine(name, rates)
        engine.pages.fill()  # a device draws less power for zeros, and runs faster
        engine.record((kind.decodes for kind in kinds if not kind.prefills), mixed, rates)
        seconds = [median_step(engine, kind, runs=_RUNS) for kind in kinds]
        del engine  # its memory is needed for the next one
        sequential = sequential or seconds
        start = replace(ceilings, overlap=SEQUENTIAL if name == "sequential" else _START)
        found = calibrate(start, measured(kinds, seconds, ceilings.rates.reach))
        if name == "sequential":
            rates = found.cost.rates  # by which the others cut steps
        fitted[name] = FittedStrategy(
            hardware=found.cost.hardware,
            exponent=found.cost.overlap.exponent,
            cascade=ceilings.cascade,
            share_near=found.share_near,
            largest_miss=found.largest_miss,
            gain=math.exp(sum(math.log(sequential[i] / seconds[i]) for i in blends) / len(blends)),
        )
    return DeviceCalibration(fitted)
