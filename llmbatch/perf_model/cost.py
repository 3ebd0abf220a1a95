"""Compute and memory seconds of a request, a step and a whole set, from a model's shape and a device.

The performance model of BlendServe 4.1, with four changes. Attention over a prompt is causal, so it counts half the
square (2 p^2 H L, not 4). Output lengths are distributions, so memory takes their second moment. Sliding layers read a
window only. And the work of engines is counted to the token (`llmbatch.perf_model.work`): the last token of an answer
is never computed, a prompt's KV is read once while it is computed. With p prompt and d output tokens, if all layers
attend to everything:

    compute = (2 (p + d - 1) P + 2 d P_head) / F + 2 p (p + 1) H L / F_attention
    memory  = (p E[d] + (E[d^2] - E[d]) / 2) * bytes per token / B

Prompt tokens found in pages are not computed, nor is their attention. If decodes read a long prefix of the prompt
together (`cascade`), each is charged 1 / `GROUP_ROWS` of its reads in layers without a window: a group has at least so
many rows. A larger group reads less.

`P_head` is the LM head if the engine computes it for sampled tokens only (`ModelShape.from_config`); the named shapes
count it into P, as the paper does.

A step's floor is reading the weights, and of experts those alone that its tokens are sent to. Law `paper` puts it under
the compute: c >= W / B. Law `bytes` follows the physical memory: weights and KV share it, m = (W + KV) / B, and c has
no floor. Where products run while their own weights are read, both together take ((W / B)^e + c^e)^(1/e), and what that
is beyond W / B counts as compute. The exponent e is measured (`Hardware.weight_overlap`); 1 hides nothing.

Products of an expert take whole tiles of rows (`Hardware.expert_tile`), and most steps give an expert few rows. What
the empty ones take is compute of a step, and of no request: it is in no optimum, as fixed seconds are in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmbatch.choices import Law as Law
from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ParameterError
from llmbatch.kernels.cascade import GROUP_ROWS
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import ModelShape
from llmbatch.perf_model.work import (
    Rates,
    Reach,
    compute_seconds,
    memory_seconds,
    overlapped,
    pairs_of,
    reads_of,
    spared_of,
    step_parts,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How compute and memory time add up: (c^e + m^e)^(1/e). e = 1: one after the other; infinite: fully hidden."""

    exponent: float = 4.0

    def __post_init__(self) -> None:
        if not self.exponent >= 1:
            raise ParameterError(f"overlap_exponent must be at least 1, got {self.exponent}")

    def __call__(self, compute: ArrayLike, memory: ArrayLike) -> Floats:
        """Return the seconds that both take together, elementwise."""
        return as_python(overlapped)(np.asarray(compute, np.float64), np.asarray(memory, np.float64), self.exponent)


SEQUENTIAL = Overlap(1.0)
OVERLAPPED = Overlap(4.0)


class StepSeconds(NamedTuple):
    """The seconds that one step takes of either resource."""

    compute: float
    memory: float


@dataclass(frozen=True)
class CostModel:
    """A model on a device, under a law: arithmetic on arrays, no state."""

    shape: ModelShape
    hardware: Hardware
    law: Law = "paper"
    overlap: Overlap = OVERLAPPED
    cascade: bool = False  # decodes of the engine read a prefix that many of them share once a step

    def __post_init__(self) -> None:
        if self.law not in get_args(Law):
            raise ParameterError(f"law must be one of {', '.join(get_args(Law))}, got {self.law!r}")

    @cached_property
    def rates(self) -> Rates:
        """The seconds of each kind of work."""
        shape, hardware = self.shape, self.hardware
        return Rates(
            seconds_per_token=2.0 * shape.params / hardware.flops + hardware.token_seconds,
            seconds_per_sample=2.0 * shape.head_params / hardware.flops,
            seconds_per_pair=4.0 * shape.attention_width * shape.layers / hardware.attention_flops,
            seconds_per_kv_token=shape.kv_bytes_per_token / hardware.bytes_per_second,
            weight_seconds=shape.weight_bytes / hardware.weight_bytes_per_second,
            weights_share_memory=self.law == "bytes",
            cascade=self.cascade,
            reach=Reach.of(shape.windows),
            step_seconds=float(hardware.step_seconds),
            weight_overlap=hardware.weight_overlap,
            expert_seconds=shape.expert_bytes / hardware.weight_bytes_per_second,
            expert_share=shape.experts_chosen / shape.experts if shape.experts else 1.0,
            step_tokens=hardware.step_tokens,
            tile_seconds=2.0 * hardware.expert_tile * shape.expert_params / hardware.flops,
            tile_rows=hardware.expert_tile,
        )

    @property
    def in_turn(self) -> bool:
        """Whether no part of a step hides behind another one, but for products behind the reading of weights."""
        return self.law == "bytes" and self.overlap.exponent == 1

    def prompt_seconds(self, tokens: ArrayLike) -> Floats:
        """Return the compute seconds of prompt tokens without their attention."""
        return np.asarray(tokens, np.float64) * self.rates.seconds_per_token

    def saved_seconds(self, found: ArrayLike) -> Floats:
        """Return the compute seconds that requests save if each finds so many prompt tokens in pages."""
        tokens = np.asarray(found, np.float64)
        seconds: Floats = as_python(compute_seconds)(
            self.rates, tokens, 0.0, as_python(pairs_of)(self.rates.reach, 0.0, tokens)
        )
        return seconds

    def request_compute(self, prompt: ArrayLike, output: ArrayLike, found: ArrayLike = 0.0) -> Floats:
        """Return compute seconds of requests by prompt tokens and (expected) output tokens, some found in pages."""
        p, d, f = (np.asarray(x, np.float64) for x in (prompt, output, found))
        pairs = as_python(pairs_of)(self.rates.reach, f, p - f)
        seconds: Floats = as_python(compute_seconds)(self.rates, p - f + d - 1.0, d, pairs)
        return seconds

    def request_memory(
        self,
        prompt: ArrayLike,
        output: ArrayLike,
        second_moment: ArrayLike,
        together: ArrayLike = 0.0,
        found: ArrayLike = 0.0,
    ) -> Floats:
        """Return memory seconds of requests by prompt tokens, E[output tokens] and E[output tokens^2].

        `together` of the prompts' tokens are read in groups (`llmbatch.planning.cascade`), and some are found in pages.
        """
        p, d, dd, f = (np.asarray(x, np.float64) for x in (prompt, output, second_moment, found))
        prefill = as_python(memory_seconds)(self.rates, as_python(reads_of)(self.rates.reach, f, p - f))
        seconds: Floats = prefill + self.decode_memory(p, d - 1.0, dd - 2.0 * d + 1.0, together)
        return seconds

    def decode_memory(
        self, context: ArrayLike, decodes: ArrayLike, second_moment: ArrayLike, together: ArrayLike = 0.0
    ) -> Floats:
        """Return memory seconds of decodes, from E[decodes] and E[decodes^2].

        The first decode of each request comes after `context` tokens.
        """
        start, n, nn, shared = (np.asarray(x, np.float64) for x in (context, decodes, second_moment, together))
        # Exact where the number is known or all layers see everything, else a bound from above: what a decode reads on
        # average rises with their number, ever more slowly, and the mean of nn / n over all decodes is above that.
        many = np.divide(nn, n, out=np.ones(np.broadcast(nn, n).shape), where=n > 0)
        read = n * as_python(pairs_of)(self.rates.reach, start, many) / many
        spared = as_python(spared_of)(self.rates.reach, shared * n * (1.0 - 1.0 / GROUP_ROWS))
        return as_python(memory_seconds)(self.rates, read - spared)

    def step(self, tokens: int, pairs: float, kv_tokens: float, samples: int) -> StepSeconds:
        """Cost one step of `tokens` tokens.

        It has `pairs` query-key pairs of prefill, reads `kv_tokens` of KV and samples `samples` tokens, as
        `llmbatch.perf_model.work` counts them.
        """
        return StepSeconds(*as_python(step_parts)(self.rates, tokens, samples, pairs, kv_tokens))

    def step_time(self, tokens: int, pairs: float, kv_tokens: float, samples: int) -> float:
        """Return the seconds of such a step from start to end: its work, overlapped, and the fixed cost of any step."""
        return float(self.overlap(*self.step(tokens, pairs, kv_tokens, samples))) + self.hardware.step_seconds

    def optimal_seconds(self, compute: float, memory: float, pool_bytes: float) -> float:
        """Return T_opt: total compute (shared prompts taken out) and KV memory seconds, perfectly blended.

        The fixed cost of each step is not in it. Under law `bytes` each filling of the pool is read together with the
        weights.
        """
        if self.law == "bytes":
            memory *= 1.0 + self.weights_per_pool(pool_bytes)
        return float(self.overlap(compute, memory))

    def weights_per_pool(self, pool_bytes: float) -> float:
        """Return the seconds of reading the weights over those of reading so much KV."""
        return self.rates.weight_seconds * self.hardware.bytes_per_second / pool_bytes
