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

A step's floor is reading the weights. Law `paper` puts it under the compute: c >= W / B. Law `bytes` follows the
physical memory: weights and KV share it, m = (W + KV) / B, and c has no floor. Where products run while their own
weights are read, both together take ((W / B)^e + c^e)^(1/e), and what that is beyond W / B counts as compute. The
exponent e is measured (`Hardware.weight_overlap`); 1 hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmbatch.choices import Law as Law
from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ModelError, ParameterError
from llmbatch.kernels.cascade import GROUP_ROWS
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.shape import UNGATED, count_sparse_layers, read_field, read_windows
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The cost of a model: parameters, attention width and KV bytes."""

    params: float  # active per computed token
    head_params: float = 0.0  # further ones per sampled token
    params_total: float
    weight_bytes: float
    layers: int
    attention_width: float  # query heads x head size; the mean of key and value sizes where they differ
    kv_bytes_per_token: float  # all layers
    windows: tuple[int, ...]  # [layers] tokens a layer looks back; 0: all
    vocabulary: int

    def __post_init__(self) -> None:
        if len(self.windows) != self.layers:
            raise ParameterError(f"windows must be one for each of {self.layers} layers, got {len(self.windows)}")

    @classmethod
    def from_config(cls, config: object, dtype_bytes: float, layer_bytes: float | None = None) -> ModelShape:
        """Read the shape off a transformers config (its `text_config` if it has one), duck-typed.

        `params` are the matrices that every token passes: projections, feed-forward, and with experts the router, the
        shared and the chosen ones. `dtype_bytes` is the size of a number of weights and KV, and `layer_bytes` of one in
        the layers' matrices, if it is another. Raises `ModelError` if a needed field is missing.
        """
        text = getattr(config, "text_config", None) or config
        name = read_field(text, "model_type", default="the model")

        def need(*names: str) -> int:
            value = read_field(text, *names)
            if value is None:
                raise ModelError(f"a model's config must give {names[0]}, but that of {name} does not")
            return int(value)

        hidden, layers = need("hidden_size", "n_embd"), need("num_hidden_layers", "n_layer")
        heads, vocabulary = need("num_attention_heads", "n_head"), need("vocab_size")
        kv_heads = int(read_field(text, "num_key_value_heads", default=heads))
        head = int(read_field(text, "head_dim", default=hidden // heads))
        latent = read_field(text, "kv_lora_rank")
        if latent is None:
            width = float(heads * head)
            kv_width = 2.0 * kv_heads * head
            attention = hidden * heads * head * 2 + hidden * 2 * kv_heads * head
        else:  # multi-head latent attention: keys and values are read from one latent vector and a rotary part
            rope, plain, value = need("qk_rope_head_dim"), need("qk_nope_head_dim"), need("v_head_dim")
            query = read_field(text, "q_lora_rank")
            width = heads * (rope + plain + value) / 2
            kv_width = float(latent + rope)
            attention = hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
            queries = heads * (rope + plain)
            attention += hidden * query + query * queries if query else hidden * queries

        matrices = 2 if name in UNGATED else 3
        experts = int(read_field(text, "num_local_experts", "num_experts", "n_routed_experts", default=0))
        inner = int(read_field(text, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden))
        dense = matrices * hidden * inner
        sparse_layers = count_sparse_layers(text, layers) if experts else 0
        active, total = layers * attention + (layers - sparse_layers) * dense, 0.0
        total = float(active)
        if experts:
            chosen = need("num_experts_per_tok", "top_k_experts")
            expert = matrices * hidden * int(read_field(text, "moe_intermediate_size", default=inner))
            shared = matrices * hidden * int(read_field(text, "shared_expert_intermediate_size", default=0))
            shared += expert * int(read_field(text, "n_shared_experts", default=0))
            router = hidden * experts
            active += sparse_layers * (chosen * expert + shared + router)
            total += sparse_layers * (experts * expert + shared + router)
        embedding = vocabulary * hidden
        whole_tied = read_field(config, "tie_word_embeddings", default=True)
        tied = bool(read_field(text, "tie_word_embeddings", default=whole_tied))
        rest = embedding * (1 if tied else 2) + (2 * layers + 1) * hidden
        return cls(
            params=float(active),
            head_params=float(embedding),
            params_total=total + rest,
            weight_bytes=total * (layer_bytes or dtype_bytes) + rest * dtype_bytes,
            layers=layers,
            attention_width=width,
            kv_bytes_per_token=kv_width * layers * dtype_bytes,
            windows=read_windows(text, layers),
            vocabulary=vocabulary,
        )


def _named(params: float, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        params=params,
        params_total=params,
        weight_bytes=2 * params,
        layers=layers,
        attention_width=float(heads * head),
        kv_bytes_per_token=2.0 * kv_heads * head * layers * 2,
        windows=(0,) * layers,
        vocabulary=vocabulary,
    )


# Models of the papers, in 2-byte weights and KV.
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama-3-8b": _named(8.03e9, 32, 32, 8, 128, 128256),
        "llama-3-70b": _named(70.6e9, 80, 64, 8, 128, 128256),
        "llama-2-7b": _named(6.74e9, 32, 32, 32, 128, 32000),
        "qwen-2.5-7b": _named(7.62e9, 28, 28, 4, 128, 152064),
        "qwen-2.5-72b": _named(72.7e9, 80, 64, 8, 128, 152064),
        "deepseek-67b": _named(67.4e9, 95, 64, 8, 128, 102400),
        "mistral-7b": _named(7.25e9, 32, 32, 8, 128, 32768),
        "opt-13b": _named(12.85e9, 40, 40, 40, 128, 50272),
        "smollm2-135m": _named(134.5e6, 30, 9, 3, 64, 49152),
    }
)


def find_shape(name: str) -> ModelShape:
    """Find the shape of that name (see `SHAPES`), in any case. Raises `ParameterError` for an unknown one.

    >>> find_shape("Llama-3-8B").kv_bytes_per_token
    131072.0
    """
    found = SHAPES.get(name.lower())
    if found is None:
        raise ParameterError(f"model_shape must be one of {', '.join(SHAPES)}, got {name!r}")
    return found


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
        weight_seconds = shape.weight_bytes / hardware.weight_bytes_per_second
        return Rates(
            seconds_per_token=2.0 * shape.params / hardware.flops + hardware.token_seconds,
            seconds_per_sample=2.0 * shape.head_params / hardware.flops,
            seconds_per_pair=4.0 * shape.attention_width * shape.layers / hardware.attention_flops,
            seconds_per_kv_token=shape.kv_bytes_per_token / hardware.bytes_per_second,
            weight_seconds=weight_seconds,
            weights_share_memory=self.law == "bytes",
            cascade=self.cascade,
            reach=Reach.of(shape.windows),
            step_seconds=float(hardware.step_seconds),
            weight_overlap=hardware.weight_overlap,
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
