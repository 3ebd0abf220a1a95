"""The roofline's bound on whether parts of a step should be computed at the same time.

An engine that runs kernel after kernel takes max(products, weights) + attention + reads: products of matrices take the
longer of their arithmetic and of reading the weights, attention of prefills its arithmetic, decodes the reading of
their KV. While a product is computed memory idles, and while KV is read the matrix units do. Parts that run at the same
time use both, at a price: each reads the weights for itself. So a part must have enough tokens to hide that (some 200
on current cards), and there must be reads worth hiding. These are bounds; calibration measures whether a card comes
near them (`llmbatch.engine.calibration.calibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmbatch.perf_model.work import Rates, padding_seconds, weights_read
from llmbatch.scheduler.output import Step

_WORTH: Final = 0.95  # of the time in turn: the bound must be lower for parts to be worth their while


@dataclass(frozen=True, slots=True)
class StepCost:
    """The seconds of each kind of work in a step."""

    products: float
    padding: float  # of products: empty rows in tiles of experts
    attention: float  # of prefills
    reads: float  # of KV
    weights: float  # read once

    @classmethod
    def of(cls, step: Step, rates: Rates) -> StepCost:
        """Compute the work of a step on a device."""
        samples = int(step.samples.sum())
        return cls(
            products=rates.seconds_per_token * step.num_tokens + rates.seconds_per_sample * samples,
            padding=padding_seconds(rates, float(step.num_tokens)),
            attention=rates.seconds_per_pair * step.prefill_pairs(rates.reach),
            reads=rates.seconds_per_kv_token * step.read_tokens(rates.reach),
            weights=weights_read(rates, float(step.num_tokens)),
        )

    @property
    def in_turn(self) -> float:
        """The seconds of kernel after kernel."""
        return max(self.products + self.padding, self.weights) + self.attention + self.reads

    @property
    def in_halves(self) -> float:
        """The least seconds of two equal halves, the products of one during the attention of the other."""
        return max(max(self.products + 2 * self.padding, 2 * self.weights) + self.attention, self.reads)


def halves_pay(step: Step, rates: Rates) -> bool:
    """Tell whether two halves can be faster than the whole; a single token has none."""
    work = StepCost.of(step, rates)
    return step.num_tokens > 1 and work.in_halves < _WORTH * work.in_turn
