"""When it can pay to compute parts of a step at the same time: what the roofline says.

An engine that runs kernel after kernel takes max(products, weights) + attention + reads: products of matrices take
the longer of their arithmetic and of reading the weights, attention of prefills its arithmetic, decodes the reading of
their KV. While a product is computed memory idles, and while KV is read the matrix units do. Parts that run at the
same time use both, and pay for it: each reads the weights for itself. So a part must have tokens enough to hide that
(some 200 on current cards), and there must be reads worth hiding. What is compared here are bounds; whether a card
comes near them is measured (`llmbatch.engine.calibration.calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step

_WORTH: Final = 0.95  # of the time in turn: the bound must be lower for parts to be worth their while


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes, in seconds, each by itself."""

    products: float
    attention: float  # of prefills
    reads: float  # of KV
    weights: float  # read once

    @classmethod
    def of(cls, step: Step, rates: Rates) -> StepCost:
        """The work of a step on a device."""
        samples = int(step.samples.sum())
        return cls(
            products=rates.seconds_per_token * step.num_tokens + rates.seconds_per_sample * samples,
            attention=rates.seconds_per_pair * step.prefill_pairs(rates.reach),
            reads=rates.seconds_per_kv_token * step.read_tokens(rates.reach),
            weights=rates.weight_seconds,
        )

    @property
    def in_turn(self) -> float:
        """Kernel after kernel."""
        return max(self.products, self.weights) + self.attention + self.reads

    @property
    def in_halves(self) -> float:
        """Two equal halves, the products of one beside the attention of the other, at best."""
        return max(max(self.products, 2 * self.weights) + self.attention, self.reads)


def halves_pay(step: Step, rates: Rates) -> bool:
    """Whether two halves can be faster than the whole; a single token has none."""
    work = StepCost.of(step, rates)
    return step.num_tokens > 1 and work.in_halves < _WORTH * work.in_turn


def best_share(prefills: Step, decodes: Step, rates: Rates, shares: Sequence[float]) -> float | None:
    """The share of the multiprocessors that the prefills of a step are best given; None where the whole is as fast."""
    left, right = StepCost.of(prefills, rates), StepCost.of(decodes, rates)
    in_turn = max(left.products + right.products, left.weights) + left.attention + right.reads

    def seconds(share: float) -> float:
        prefilled = max(left.products / share, left.weights) + left.attention / share
        return max(prefilled, max(right.products / (1.0 - share), right.weights) + right.reads)

    best = min(shares, key=seconds)
    return best if seconds(best) < _WORTH * in_turn else None
