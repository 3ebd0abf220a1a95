"""OOCO's predictor of a step: a roofline of each operator, summed (3.3).

As printed (Table 3, Equation 1), with N tokens in the step and d bytes a value:

    GEMM       2 N D_in D_out FLOPs,  d (N D_in + D_in D_out + N D_out) bytes
    attention  4 D_h S_q S_kv FLOPs,  2 d (S_q D_h + S_kv D_h H_kv / H_q) bytes
    seconds    sum over operators of max(FLOPs / F, bytes / M) + O

The paper prints H_q / H_kv, by which grouped queries would read more than all heads do; H_kv / H_q is meant. Attention
counts whole squares, also of causal prompts. The GEMMs are those of the layers (queries, keys and values, output, the
feed-forward's) and the LM head over all tokens, as the library's named shapes count it. Communication is left out: the
library takes collectives as hidden.

The paper fits eight constants to a device. The device here is the library's clock, so they are fitted to that: F and M
begin at the device's own rates, O at 0, and each is moved by ever smaller factors as long as the mean relative error
over decode batches of 1 to 512 rows and 256 to 4,096 tokens, and chunks of 64 to 4,096 tokens, falls (`fitted`). A sum
of maxima cannot follow every law of overlap: what is left of the error is printed in reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.shape import SHAPES, ModelShape

_BYTES: Final = 2.0  # of a value
_FACTORS: Final = (1.5, 1.2, 1.1, 1.05, 1.02, 1.01)

# Hidden size, inner size of the feed-forward, and its matrices, of the named shapes.
WIDTHS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "llama-3-8b": (4096, 14336, 3),
        "llama-3-70b": (8192, 28672, 3),
        "llama-2-7b": (4096, 11008, 3),
        "qwen-2.5-7b": (3584, 18944, 3),
        "qwen-2.5-72b": (8192, 29568, 3),
        "deepseek-67b": (8192, 22016, 3),
        "mistral-7b": (4096, 14336, 3),
        "opt-13b": (5120, 20480, 2),
        "smollm2-135m": (576, 1536, 3),
    }
)


class FittedConstants(NamedTuple):
    """Table 4: what a device achieves."""

    gemm_flops: float  # F_g, FLOP/s
    prefill_flops: float  # F_ap
    decode_flops: float  # F_ad
    gemm_bytes: float  # M_g, bytes/s
    attention_bytes: float  # M_a
    prefill_overhead: float  # O_p, s
    decode_overhead: float  # O_d


@by_reference
class Roofline(NamedTuple):
    """The operators of a model, and a device."""

    inputs: NDArray[np.float64]  # D_in of each GEMM of the model
    outputs: NDArray[np.float64]  # D_out
    times: NDArray[np.float64]  # how often the model has it
    layers: float
    hidden: float  # D_h: query heads x head size
    grouped: float  # H_kv / H_q
    constants: NDArray[np.float64]  # [7] in the order of FittedConstants

    @classmethod
    def of(cls, shape: ModelShape, constants: FittedConstants) -> Roofline:
        """List the operators of a named shape. Raises ParameterError for another one."""
        name = next((name for name, known in SHAPES.items() if known == shape), None)
        if name is None or name not in WIDTHS:
            raise ParameterError(f"model_shape (--model-shape) must be one of {', '.join(WIDTHS)} for policy ooco")
        hidden, inner, matrices = WIDTHS[name]
        width, layers = shape.attention_width, shape.layers
        values = shape.kv_bytes_per_token / layers / _BYTES  # of keys and values together, a token and layer
        gemms = [(hidden, width + values, layers), (width, hidden, layers), (inner, hidden, layers)]
        gemms += [(hidden, inner, layers * (matrices - 1)), (hidden, shape.vocabulary, 1)]
        inputs, outputs, times = (np.array(column, np.float64) for column in zip(*gemms, strict=True))
        return cls(inputs, outputs, times, float(layers), width, values / 2 / width, np.array(constants))


@compiled
def gemm_seconds(roofline: Roofline, tokens: float) -> float:
    """Predict the seconds of the GEMMs of so many tokens."""
    total, flops, speed = 0.0, roofline.constants[0], roofline.constants[3]
    if tokens <= 0:
        return 0.0
    for i in range(len(roofline.inputs)):
        a, b = roofline.inputs[i], roofline.outputs[i]
        moved = _BYTES * (tokens * a + a * b + tokens * b)
        total += roofline.times[i] * max(2.0 * tokens * a * b / flops, moved / speed)
    return total


@compiled
def attention_seconds(roofline: Roofline, queries: float, keys: float, decode: bool) -> float:
    """Predict the seconds that one sequence attends: S_q queries over S_kv keys, in all layers."""
    flops = roofline.constants[2] if decode else roofline.constants[1]
    moved = 2.0 * _BYTES * (queries * roofline.hidden + keys * roofline.hidden * roofline.grouped)
    computed = 4.0 * roofline.hidden * queries * keys
    seconds: float = roofline.layers * max(computed / flops, moved / roofline.constants[4])
    return seconds


@compiled
def overhead(roofline: Roofline, prefills: bool) -> float:
    """Return the fixed seconds of a step."""
    seconds: float = roofline.constants[5] if prefills else roofline.constants[6]
    return seconds


@dataclass(frozen=True, slots=True)
class FittedRoofline:
    """A roofline fitted to a clock, and how far it is off in the mean."""

    roofline: Roofline
    error: float  # relative


def fitted(cost: CostModel) -> FittedRoofline:
    """Fit the constants to the clock of a cost model. Raises ParameterError where the shape is not a named one."""
    hardware = cost.hardware
    constants = [hardware.flops] * 3 + [hardware.bytes_per_second] * 2 + [1e-5] * 2
    decodes = [(float(rows), float(keys)) for rows in 2 ** np.arange(10) for keys in (256, 1024, 4096)]
    chunks = [float(tokens) for tokens in 2 ** np.arange(6, 13)]
    true = np.array(
        [cost.step_time(int(rows), 0.0, rows * keys, int(rows)) for rows, keys in decodes]
        + [cost.step_time(int(tokens), tokens * (tokens + 1) / 2, tokens, 1) for tokens in chunks]
    )

    def error_of(values: list[float]) -> float:
        roofline = Roofline.of(cost.shape, FittedConstants(*values))
        predicted = [_step(roofline, rows, rows, 1.0, keys, True) for rows, keys in decodes]
        predicted += [_step(roofline, tokens, 1.0, tokens, tokens, False) for tokens in chunks]
        return float(np.mean(np.abs(np.array(predicted) / true - 1.0)))

    best = error_of(constants)
    for factor in _FACTORS:
        for _ in range(40):
            before = best
            for i in range(len(constants)):
                for trial in (constants[i] * factor, constants[i] / factor):
                    there = error_of([*constants[:i], trial, *constants[i + 1 :]])
                    if there < best:
                        constants[i], best = trial, there
            if best == before:
                break
    return FittedRoofline(Roofline.of(cost.shape, FittedConstants(*constants)), best)


def _step(roofline: Roofline, tokens: float, rows: float, queries: float, keys: float, decode: bool) -> float:
    attention = rows * attention_seconds(roofline, queries, keys, decode)
    return gemm_seconds(roofline, tokens) + attention + overhead(roofline, not decode)
