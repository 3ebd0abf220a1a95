"""How many tokens the next step computes: the mix is steered each step from what is left to do.

Let `m` be the memory time of the step's decodes, `C` and `M` the compute and memory work still to do. If every
step's compute is `C / M` times its memory time, both end together, which is the best any order can do when the
two overlap. So a step is given the tokens whose compute takes `c* = (C / M) m`, never fewer than those that
are free while the weights are read (design: "step budget"). BlendServe (section 5.3) fixes shares of memory
and hopes that the mix follows; here the mix itself is the controlled quantity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmbatch.cost import CostModel

TILE = 128  # tokens; matrix units work in tiles of this many rows


@dataclass(frozen=True, slots=True)
class Load:
    """What a budget is decided from, at the start of a step."""

    decodes: int  # sequences that will compute one token
    kv_tokens: int  # KV tokens they read
    kv_fraction: float  # of the pool, in use
    compute_left: float  # seconds of compute of everything not yet done
    memory_left: float  # seconds of KV reads of everything not yet done


class Budget(Protocol):
    """Decides the tokens of a step, prefill and decode together."""

    def tokens(self, load: Load) -> int:
        """At least one page more than the decodes."""
        ...


@dataclass(frozen=True, slots=True)
class Rates:
    """What the closed loop must know of model and hardware, in seconds."""

    seconds_per_token: float  # compute of one token's matrices
    seconds_per_kv_token: float  # reading one token's KV
    weight_seconds: float  # reading the weights once

    @classmethod
    def of(cls, cost: CostModel) -> Rates:
        """The rates of a cost model."""
        shape, hardware = cost.shape, cost.hardware
        return cls(
            seconds_per_token=2.0 * shape.params / hardware.flops,
            seconds_per_kv_token=shape.kv_bytes_per_token / hardware.bytes_per_second,
            weight_seconds=cost.weight_seconds,
        )


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same number of tokens each step, as today's engines do."""

    step_tokens: int = 2048

    def tokens(self, load: Load) -> int:
        """The fixed number; decodes beyond it are computed all the same."""
        return max(self.step_tokens, load.decodes)


@dataclass(frozen=True, slots=True)
class ClosedLoopBudget:
    """`c* = (C / M) m`, between a floor and a ceiling, rounded up to the hardware's tile."""

    rates: Rates
    floor: int = 256
    ceiling: int = 8192
    filling: int = 2048  # least budget while the pool is nearly empty
    filling_fraction: float = 0.2

    def tokens(self, load: Load) -> int:
        """The closed loop's number for this load."""
        if load.decodes == 0:
            return self.ceiling
        memory = load.kv_tokens * self.rates.seconds_per_kv_token
        left = max(load.memory_left, memory)
        target = max(load.compute_left / left * memory, self.rates.weight_seconds) if left > 0 else 0.0
        wanted = int(target / self.rates.seconds_per_token)
        floor = self.filling if load.kv_fraction < self.filling_fraction else self.floor
        tokens = min(max(wanted, floor), self.ceiling)
        return max(-(-tokens // TILE) * TILE, load.decodes + TILE)
