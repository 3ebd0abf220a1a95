"""Fits a job's cost model again to the job's own steps.

A calibration measures a device for seconds, idle; a job has it for hours, beside others, with other prompts. What
steers steps is the ratio of compute to memory time, and a calibration that is wrong by a factor of two in either costs
up to a seventh of the job. The job sees thousands of steps whose work is known, and what each took.

What is kept of them. A scheduler that steers well gives steps that are all alike, which tell how wrong the rates are
together and not which of them is: that is told by the steps of other kinds, early and late in a job. So steps are kept
by kind, the latest few of each: by the ratio of their compute to their memory time, and by whether their products take
longer than reading the weights. That is a bounded number of steps, however long the job. Where parts run in turn, what
differs between steps is how much they do beside reading the weights: there it is by the power of two between a step's
seconds and those of the weights, and by whether it has a chunk of a prompt.

How it is fitted. Steps are not linear in what is sought: compute and memory overlap, and reading the weights is a
floor. So the fit is that of a calibration, least squares of logs (`llmbatch.perf_model.fit`), and begins with the
calibration's constants, to which it is tied: where steps do not say which rate is wrong, both move alike. Steps that
took more than twice or less than half of what others of their kind did, beside what was predicted (a first launch, a
page swapped out), are left out.

At its end a job tells what it would go by now, for the next job on the same device (`Refit.finish`).

When it counts. Every other step is not fitted to. The constants in use are replaced only where they miss those steps
by more than is worth steering by, and others, the calibration's among them, miss them clearly less. So steps that agree
with the calibration change nothing, to the last bit.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import as_python
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.fit import MeasuredSteps, calibrate, predict
from llmbatch.perf_model.work import compute_seconds, memory_seconds
from llmbatch.scheduler.output import Step

Floats = NDArray[np.float64]

_KEPT: Final = 32  # steps of a kind
_FEWEST: Final = 4  # of a kind, that it counts; and kept steps altogether, in kinds
_RATIOS: Final = 4  # powers of two between compute and memory time, either way, that make kinds
_PERIOD: Final = 256  # steps between two fits, at least
_LEAST: Final = 64  # steps of a job, that say something for the next one
_TIES: Final = 1e-4  # of the mean squared log, for a constant an e-fold from the calibration's
_OUTLIER: Final = np.log(2.0)
_CLEARLY: Final = 0.7  # of a mean miss: another one that is clearly less
_SMALL: Final = 0.03  # a mean miss that steers as well as none
_COLUMNS: Final = tuple(field.name for field in fields(MeasuredSteps))


class Refit:
    """The cost model of a job, by what its steps took."""

    def __init__(self, cost: CostModel) -> None:
        """Begin with `cost`, which is the calibration's."""
        self.cost: CostModel = cost
        self._calibrated = cost
        self._steps = np.zeros((len(_COLUMNS), 2 * (2 * _RATIOS + 1), _KEPT))
        self._counts = np.zeros(self._steps.shape[1], np.int64)  # by kind: steps ever seen
        self._seen, self._due = 0, _PERIOD
        self._fresh: list[tuple[float, ...]] = []  # steps that are to be kept, together

    def note(self, steps: MeasuredSteps) -> None:
        """Keep steps, in the order in which they were taken, in place of the oldest of their kind."""
        columns = np.stack([np.asarray(getattr(steps, name), np.float64) for name in _COLUMNS])
        kinds = self._kinds(columns)
        for kind in np.unique(kinds).tolist():
            mine = columns[:, kinds == kind]
            count = mine.shape[1]
            at = (self._counts[kind] + np.arange(count)[-_KEPT:]) % _KEPT
            self._steps[:, kind, at] = mine[:, -_KEPT:]
            self._counts[kind] += count
        self._seen += len(steps)

    def note_step(self, step: Step, seconds: float) -> None:
        """Keep one step, unless it was too short for the clock."""
        if seconds <= 0:
            return
        reach = self._calibrated.rates.reach
        work = step.num_tokens, step.prefill_pairs(reach), step.read_tokens(reach), int(step.samples.sum())
        self._fresh.append((*work, seconds))
        if len(self._fresh) == _KEPT:
            self._keep_fresh()

    def fit(self) -> bool:
        """Fit anew where enough steps came since the last time; whether the cost model is another now."""
        if self._seen < self._due:
            return False
        self._due = self._seen + max(_PERIOD, self._seen // 8)
        return self._improve()

    def finish(self) -> CostModel:
        """Fit to what is there, where it is not too little, and return the cost model for the next job."""
        self._keep_fresh()
        if self._seen >= _LEAST:
            self._improve()
        return self.cost

    def _keep_fresh(self) -> None:
        if self._fresh:
            self.note(MeasuredSteps(*np.array(self._fresh, np.float64).T))
            self._fresh.clear()

    def _improve(self) -> bool:
        """Replace the constants in use where others are clearly better."""
        fitted, judged = self._sound()
        if not judged.shape[1]:
            return False
        unseen = MeasuredSteps(*judged)
        now = _miss(self.cost, unseen)
        if now <= _SMALL:
            return False
        found = calibrate(self._calibrated, MeasuredSteps(*fitted), ties=_TIES).cost
        best = min((self._calibrated, found), key=lambda cost: _miss(cost, unseen))
        if _miss(best, unseen) > _CLEARLY * now:
            return False
        self.cost = best
        return True

    def _kinds(self, columns: Floats) -> NDArray[np.int64]:
        tokens, pairs, kv_tokens, samples, _ = columns
        rates = self._calibrated.rates
        if self._calibrated.in_turn:
            seconds = predict(self._calibrated, MeasuredSteps(*columns))
            larger = np.clip(np.rint(np.log2(seconds / rates.weight_seconds)), 0, 2 * _RATIOS)
            by_size: NDArray[np.int64] = 2 * larger.astype(np.int64) + (pairs > 0)
            return by_size
        products = as_python(compute_seconds)(rates, tokens, samples, 0.0)
        compute = as_python(compute_seconds)(rates, tokens, samples, pairs)
        memory = np.maximum(as_python(memory_seconds)(rates, kv_tokens), 1e-12)
        ratio = np.clip(np.rint(np.log2(compute / memory)), -_RATIOS, _RATIOS) + _RATIOS
        kinds: NDArray[np.int64] = 2 * ratio.astype(np.int64) + (products > rates.weight_seconds)
        return kinds

    def _sound(self) -> tuple[Floats, Floats]:
        """Return the steps to fit to and those to judge by, [columns, steps] each, without outliers in seconds."""
        parts: tuple[list[Floats], list[Floats]] = ([], [])
        for kind in np.flatnonzero(self._counts >= _FEWEST).tolist():
            steps = self._steps[:, kind, : min(int(self._counts[kind]), _KEPT)]
            misses = np.log(steps[-1] / predict(self._calibrated, MeasuredSteps(*steps)))
            near = np.abs(misses - np.median(misses)) < _OUTLIER
            for half, part in enumerate(parts):
                part.append(steps[:, half::2][:, near[half::2]])
        empty = np.empty((len(_COLUMNS), 0))
        fitted, judged = (np.concatenate([empty, *part], axis=1) for part in parts)
        return fitted, judged


def _miss(cost: CostModel, steps: MeasuredSteps) -> float:
    """Return the mean of |log(predicted / measured)|."""
    return float(np.mean(np.abs(np.log(predict(cost, steps) / np.asarray(steps.seconds, np.float64)))))
