"""A fit of a device's efficiencies and the overlap law to measured steps.

Parameters. Three fractions of a device's ceilings are fitted: of its compute in products, of its compute in attention
over prompts, of its bandwidth. So are the seconds that every step takes in addition to its work. For an engine that
overlaps, the exponent of the overlap law is fitted; one that runs kernel after kernel has the exponent 1, and keeps it.

Why attention has a rate of its own. Between its two products stands a softmax, which matrix units do not compute, so it
reaches about half the rate of plain products. One rate for both would be wrong for every step whose prompts are not of
mean length.

Processors. There the weights have a rate of their own, if the model has one for them: decodes multiply what they read
of KV, and are slower. A product of few rows takes as long as its weight is read, one of many rows the time of its
arithmetic, and between them is a knee. So the exponent by which the two overlap is fitted too, under law `bytes`. A
step in turn there has no other fixed seconds, since steps could not tell these from the reading.

Which law. An engine that runs kernel after kernel follows law `paper` with exponent 1: each product takes the longer of
its arithmetic and reading its weights, each attention the time of reading its KV, and all of them add up.

Why logs. Steps differ in length by a factor of a hundred, and a miss of 10 % is as bad in each of them. So the fit
minimises the mean of log(predicted / measured)^2, by damped Gauss-Newton steps (Levenberg, 1944; Marquardt, 1963) kept
within bounds. Efficiencies and the exponent are moved in the logarithm. A ridge far below the noise of any clock holds
parameters that no step depends on at their initial values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.work import step_parts

Floats = NDArray[np.float64]

_RIDGE = 1e-6  # of the mean squared log, for a parameter an e-fold from where it began
_LEAST_EFFICIENCY = 1e-5  # of a card, whose host may attend
_MOST_EXPONENT = 16.0
_ROUNDS = 200
_NUDGE = 1e-6  # of a parameter, for the slopes
_NEAR = 0.1  # a prediction that misses by this share is a good one


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps and their measured seconds; float or int [n] each, see `CostModel.step`.

    Raises `ParameterError` if there are no steps, columns differ in length, a step took no time, or a figure is
    negative.
    """

    tokens: NDArray[np.generic]  # computed
    pairs: NDArray[np.generic]  # of queries and keys, in prefill
    kv_tokens: NDArray[np.generic]  # read by decodes
    samples: NDArray[np.generic]
    seconds: NDArray[np.generic]

    def __post_init__(self) -> None:
        columns = {field.name: np.asarray(getattr(self, field.name), np.float64) for field in fields(self)}
        sizes = {name: column.size for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
            raise ParameterError(f"columns of measured steps must be equally long, got {found}")
        if not len(self):
            raise ParameterError("a calibration must have at least one measured step, got none: measure some")
        for name, column in columns.items():
            positive = name in ("tokens", "seconds")
            bad = ~np.isfinite(column) | (column <= 0 if positive else column < 0)
            if bad.any():
                at, rule = int(np.argmax(bad)), "positive" if positive else "at least 0"
                raise ParameterError(
                    f"{name} of a measured step must be {rule}, got {column[at]} at step {at}: leave it out"
                )

    def __len__(self) -> int:
        """Return the number of steps."""
        return int(np.asarray(self.seconds).size)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted cost model, and how well it predicts the steps it was fitted to."""

    cost: CostModel
    share_near: float  # of the steps, that are predicted within 10 %
    largest_miss: float  # of |predicted / measured - 1|


def calibrate(cost: CostModel, steps: MeasuredSteps, *, ties: float = _RIDGE) -> Calibration:
    """Fit a cost model to measured steps, beginning with its own constants.

    The exponent is fitted, between 1 and 16, if the model's is above 1. Constants that no step depends on keep their
    values. `ties` is the mean squared log that a constant an e-fold from its start must gain. The same steps always
    give the same constants.
    """
    begun = _Constants.of(cost, float(np.median(np.asarray(steps.seconds, np.float64))))
    moved = begun.moved_by(steps)
    measured = np.log(np.asarray(steps.seconds, np.float64))
    weight = 1 / math.sqrt(len(steps))

    def residuals(values: Floats) -> Floats:
        misses = np.log(predict(begun.at(values, moved), steps)) - measured
        return np.concatenate((weight * misses, math.sqrt(ties) * (values - begun.values[moved])))

    low, high = begun.low[moved], begun.high[moved]
    fitted = begun.at(_descend(residuals, begun.values[moved], low, high), moved)
    return judge(fitted, steps)


def judge(cost: CostModel, steps: MeasuredSteps) -> Calibration:
    """Score a cost model, without fitting it, by how well it predicts these steps."""
    misses = np.abs(predict(cost, steps) / np.asarray(steps.seconds, np.float64) - 1)
    return Calibration(cost, float(np.mean(misses <= _NEAR)), float(misses.max()))


def predict(cost: CostModel, steps: MeasuredSteps) -> Floats:
    """Predict the seconds of each step by a cost model, float64 [n]: `CostModel.step_time` of columns."""
    tokens, pairs, kv_tokens, samples = (
        np.asarray(column, np.float64) for column in (steps.tokens, steps.pairs, steps.kv_tokens, steps.samples)
    )
    parts = as_python(step_parts)(cost.rates, tokens, samples, pairs, kv_tokens)
    return cost.overlap(*parts) + cost.hardware.step_seconds


@dataclass(frozen=True, slots=True)
class _Constants:
    """The constants to fit, scaled to about one.

    These are four log efficiencies, fixed seconds in `unit`, and the log exponents of steps and of products beside
    the reading of their weights.
    """

    cost: CostModel
    unit: float
    values: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, cost: CostModel, unit: float) -> _Constants:
        hardware = cost.hardware
        attention = hardware.attention_flops / hardware.compute
        weights = hardware.weight_bytes_per_second / hardware.bandwidth
        efficiencies = np.log([hardware.compute_efficiency, attention, hardware.bandwidth_efficiency, weights])
        exponent = math.log(cost.overlap.exponent)
        values = np.array([*efficiencies, hardware.step_seconds / unit, exponent, math.log(hardware.weight_overlap)])
        low = np.array([*np.full(4, math.log(_LEAST_EFFICIENCY)), 0.0, 0.0, 0.0])
        high = np.array([0.0, 0.0, 0.0, 0.0, math.inf, math.log(_MOST_EXPONENT), math.log(_MOST_EXPONENT)])
        return cls(cost, unit, np.clip(values, low, high), low, high)

    def moved_by(self, steps: MeasuredSteps) -> NDArray[np.bool_]:
        """Tell which constants are fitted to these steps."""
        own = self.cost.hardware.weight_efficiency is not None
        exponent = self.cost.overlap.exponent > 1
        hides = own and self.cost.law == "bytes"
        return np.array([True, bool(np.any(steps.pairs)), True, own, exponent or not hides, exponent, hides])

    def at(self, values: Floats, moved: NDArray[np.bool_]) -> CostModel:
        """Build the cost model with these values for the constants that are `moved`."""
        every = self.values.copy()
        every[moved] = values
        compute, attention, bandwidth, weights, exponent = np.exp(every[[0, 1, 2, 3, 5]]).tolist()
        hardware = replace(
            self.cost.hardware,
            compute_efficiency=compute,
            bandwidth_efficiency=bandwidth,
            attention_efficiency=attention if moved[1] else self.cost.hardware.attention_efficiency,
            weight_efficiency=weights if moved[3] else self.cost.hardware.weight_efficiency,
            weight_overlap=math.exp(every[6]) if moved[6] else self.cost.hardware.weight_overlap,
            step_seconds=float(every[4]) * self.unit,
        )
        overlap = Overlap(exponent) if moved[5] else self.cost.overlap
        return replace(self.cost, hardware=hardware, overlap=overlap)


def _descend(residuals: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats) -> Floats:
    """Find the bounded minimum of the sum of squared residuals, downhill from a start."""
    at, damping = start, 1e-3
    missing = residuals(at)
    for _ in range(_ROUNDS):
        slopes = _slopes(residuals, at, missing, high)
        gradient, curvature = slopes.T @ missing, slopes.T @ slopes
        # A value at its bound that is drawn beyond it stays there; the others move as if it were given.
        free = ~(((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0)))
        inner = curvature[np.ix_(free, free)]
        before = float(missing @ missing)
        while damping < 1e9:
            there = at.copy()
            there[free] -= np.linalg.solve(inner + damping * np.diag(np.diag(inner)), gradient[free])
            there = np.clip(there, low, high)
            then = residuals(there)
            if then @ then < before:
                break
            damping *= 4
        else:
            return at
        at, missing, damping = there, then, max(damping / 10, 1e-9)
        if before - float(missing @ missing) < 1e-12 * before:
            break
    return at


def _slopes(residuals: Callable[[Floats], Floats], at: Floats, missing: Floats, high: Floats) -> Floats:
    """Return the derivative of each residual by each value, [residuals, values], by differences within the bounds."""
    slopes = np.empty((missing.size, at.size))
    for i in range(at.size):
        nudge = -_NUDGE if at[i] + _NUDGE > high[i] else _NUDGE
        moved = at.copy()
        moved[i] += nudge
        slopes[:, i] = (residuals(moved) - missing) / nudge
    return slopes
