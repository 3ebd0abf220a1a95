"""What steps and requests take, counted in one way wherever it is counted: plan, accounts, budget and clock.

A chunk is the tokens that a step computes of one sequence: `count` tokens after `start` others; a decode is a chunk of
one. It computes its tokens' products, samples at most one token, multiplies each query with every key up to its own
(*pairs*), and reads the KV of its sequence once, its own tokens' included (*reads*). A request of p prompt tokens, of
which f are found in pages, and d output tokens is a chunk of p - f tokens after f, and d - 1 decodes; the last of its
tokens is sampled and never computed. What depends on how a schedule goes is the clock's alone: that a prompt is cut
into several chunks, each of which reads the KV of those before, and what is computed again after a preemption.

Layers differ in how far they look back. Pairs and reads are means over the layers, so they may be fractions.

The compiled functions take numbers; `as_python(function)` takes arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference

Floats = NDArray[np.float64]
Numbers = float | Floats

_LEAST: Final = 1e-300  # seconds; keeps a step of no work from a division by zero
_UNBOUNDED: Final = float(1 << 40)  # tokens; more than any sequence has, and exact in sums of squares of lengths


@by_reference
class Reach(NamedTuple):
    """How far layers look back: distinct windows, ascending, and the share of the layers that have each."""

    windows: NDArray[np.float64]  # tokens, a layer's own among them
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, windows: Sequence[int]) -> Reach:
        """Return the windows of layers, in tokens; 0 looks back to the first."""
        values, counts = np.unique([float(w) if w else _UNBOUNDED for w in windows], return_counts=True)
        return cls(values, counts / len(windows))


@by_reference
class Rates(NamedTuple):
    """What must be known of model and hardware to tell what work takes, in seconds."""

    seconds_per_token: float  # compute of one token's matrices
    seconds_per_sample: float  # compute of one token sampled, beside its matrices
    seconds_per_pair: float  # compute of one query with one key, in all layers
    seconds_per_kv_token: float  # reading one token's KV
    weight_seconds: float  # reading all weights once
    weights_share_memory: bool  # law `bytes`: the weights are read beside the KV, in every step
    cascade: bool = False  # decodes read a prefix that many of them share once a step
    reach: Reach = Reach.of([0])
    step_seconds: float = 0.0  # that every step takes beside its work
    weight_overlap: float = 1.0  # exponent of products beside the reading of their weights; law `bytes`
    expert_seconds: float = 0.0  # of `weight_seconds`, reading experts
    expert_share: float = 1.0  # of a layer's experts, that a token is sent to
    step_tokens: int = 0  # the most that a step has memory for; 0: as many as are wanted
    tile_seconds: float = 0.0  # compute of a tile of rows of every expert
    tile_rows: int = 1


@overload
def pairs_of(reach: Reach, start: float, count: float) -> float: ...
@overload
def pairs_of(reach: Reach, start: Floats, count: Numbers) -> Floats: ...
@overload
def pairs_of(reach: Reach, start: float, count: Floats) -> Floats: ...
@compiled
def pairs_of(reach: Reach, start: Any, count: Any) -> Any:
    """Count the query-key pairs of a chunk; also what as many decodes after `start` tokens read."""
    total = 0.0
    for i in range(len(reach.windows)):
        window = reach.windows[i]
        inside = np.minimum(np.maximum(window - start, 0.0), count)  # tokens before which the layer sees everything
        seen = inside * start + inside * (inside + 1.0) / 2.0 + (count - inside) * window
        total = total + reach.shares[i] * seen
    return total


@overload
def reads_of(reach: Reach, start: float, count: float) -> float: ...
@overload
def reads_of(reach: Reach, start: Floats, count: Numbers) -> Floats: ...
@overload
def reads_of(reach: Reach, start: float, count: Floats) -> Floats: ...
@compiled
def reads_of(reach: Reach, start: Any, count: Any) -> Any:
    """Count the KV tokens that a chunk reads."""
    total = 0.0
    for i in range(len(reach.windows)):
        total = total + reach.shares[i] * (count + np.minimum(start, reach.windows[i] - 1.0))
    return total


@compiled
def sees_all(reach: Reach) -> bool:
    """Tell whether no layer has a window: then a decode reads its sequence, and no loop over layers is needed."""
    return len(reach.windows) == 1 and bool(reach.windows[0] >= _UNBOUNDED)


@compiled
def chunk_reads(reach: Reach, unbounded: bool, start: float, count: float) -> float:
    """Count the KV tokens that one chunk reads; `unbounded` is `sees_all`, asked once for many chunks."""
    return start + count if unbounded else reads_of(reach, start, count)


@overload
def spared_of(reach: Reach, tokens: float) -> float: ...
@overload
def spared_of(reach: Reach, tokens: Floats) -> Floats: ...
@compiled
def spared_of(reach: Reach, tokens: Any) -> Any:
    """Count what decodes are spared of `tokens` that others read for them: those of layers without a window."""
    last = len(reach.windows) - 1
    return tokens * reach.shares[last] if reach.windows[last] >= _UNBOUNDED else tokens * 0.0


@overload
def compute_seconds(rates: Rates, tokens: float, samples: float, pairs: float) -> float: ...
@overload
def compute_seconds(rates: Rates, tokens: Floats, samples: Numbers, pairs: Numbers) -> Floats: ...
@compiled
def compute_seconds(rates: Rates, tokens: Any, samples: Any, pairs: Any) -> Any:
    """Predict seconds of compute, reading the weights left out."""
    return tokens * rates.seconds_per_token + samples * rates.seconds_per_sample + pairs * rates.seconds_per_pair


@overload
def memory_seconds(rates: Rates, read: float) -> float: ...
@overload
def memory_seconds(rates: Rates, read: Floats) -> Floats: ...
@compiled
def memory_seconds(rates: Rates, read: Any) -> Any:
    """Predict seconds of reading KV tokens."""
    return read * rates.seconds_per_kv_token


@overload
def overlapped(compute: float, memory: float, exponent: float) -> float: ...
@overload
def overlapped(compute: Floats, memory: Numbers, exponent: float) -> Floats: ...
@compiled
def overlapped(compute: Any, memory: Any, exponent: float) -> Any:
    """Return the seconds that compute and memory take together: (c^e + m^e)^(1/e)."""
    longer, shorter = np.maximum(compute, memory), np.minimum(compute, memory)
    ratio = shorter / np.maximum(longer, _LEAST)
    return longer * np.exp(np.log1p(ratio**exponent) / exponent)


@overload
def weights_read(rates: Rates, tokens: float) -> float: ...
@overload
def weights_read(rates: Rates, tokens: Floats) -> Floats: ...
@compiled
def weights_read(rates: Rates, tokens: Any) -> Any:
    """Predict the seconds of reading the weights for a step of so many tokens.

    Tokens are taken to choose experts apart from each other, each as often as another: n of them leave (1 - k / E)^n of
    E experts alone, of which each chooses k.
    """
    if rates.expert_seconds > 0.0:
        return rates.weight_seconds - rates.expert_seconds * (1.0 - rates.expert_share) ** tokens
    return rates.weight_seconds + tokens * 0.0


@overload
def padding_seconds(rates: Rates, tokens: float) -> float: ...
@overload
def padding_seconds(rates: Rates, tokens: Floats) -> Floats: ...
@compiled
def padding_seconds(rates: Rates, tokens: Any) -> Any:
    """Predict the seconds of compute by which the products of experts fill up tiles, in a step of so many tokens.

    n tokens give each of E experts n k / E rows in the mean. An expert that has any takes one tile at least; many rows
    end anywhere in their last tile of T, and (T - 1) / 2 of it are empty in the mean.
    """
    if rates.tile_seconds > 0.0:
        tiles = tokens * rates.expert_share / rates.tile_rows
        touched = 1.0 - (1.0 - rates.expert_share) ** tokens
        return rates.tile_seconds * np.maximum(touched - tiles, touched * _empty_share(rates))
    return tokens * 0.0


@compiled
def padding_of_many_rows(rates: Rates) -> float:
    """Predict the seconds of compute by which products of experts fill up tiles, where each expert has many rows."""
    return rates.tile_seconds * _empty_share(rates)


@compiled
def least_products(rates: Rates) -> float:
    """Predict the least seconds of the products of a step that touches all weights: these are read, or tiles filled."""
    return max(rates.weight_seconds, rates.tile_seconds)


@compiled
def hidden_seconds(rates: Rates) -> float:
    """Return the seconds of products that make such a step no longer: they hide behind the reading, or in tiles."""
    hidden: float = least_products(rates) - padding_of_many_rows(rates)
    return hidden


@compiled
def _empty_share(rates: Rates) -> float:
    return (rates.tile_rows - 1.0) / (2.0 * rates.tile_rows)


@overload
def step_parts(rates: Rates, tokens: float, samples: float, pairs: float, read: float) -> tuple[float, float]: ...
@overload
def step_parts(rates: Rates, tokens: Floats, samples: Floats, pairs: Floats, read: Floats) -> tuple[Floats, Floats]: ...
@compiled
def step_parts(rates: Rates, tokens: Any, samples: Any, pairs: Any, read: Any) -> Any:
    """Predict a step's seconds of compute and of memory, under the law of `rates`.

    The weights are read once a step. Law `paper` makes that the least that products take, and it hides no attention;
    law `bytes` adds it to the reading of KV, and products then count what they take beyond it.
    """
    products = tokens * rates.seconds_per_token + samples * rates.seconds_per_sample + padding_seconds(rates, tokens)
    memory = read * rates.seconds_per_kv_token
    weights = weights_read(rates, tokens)
    if rates.weights_share_memory:
        memory = memory + weights
        if rates.weight_overlap > 1.0:
            products = overlapped(products, weights, rates.weight_overlap) - weights
    else:
        products = np.maximum(products, weights)
    return products + pairs * rates.seconds_per_pair, memory
