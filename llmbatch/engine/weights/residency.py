"""Decides where the weights of layers lie: all in memory, or some in a file that each step reads.

Memory that is given for weights holds what is around the layers first, then the buffers through which layers come, then
as many layers as fit. So half the memory leaves half the layers to be read. Of a mixture only experts are read: they
are most of it, and attention is needed by every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmbatch.choices import WeightsName
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.perf_model.shape import ModelShape

BUFFERS: Final = 2  # of weights on their way: one is used while the next one comes
_FITS: Final = 0.85  # of the memory that is free, which weights may take that all stay there
_STREAMED: Final = 0.5  # of it, where they do not fit: each byte less is read at every step


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """What a step reads of the weights, and how fast it comes."""

    kept_bytes: int  # in memory, with the buffers
    streamed_bytes: int  # in the file
    bytes_per_second: float  # of reading it, measured

    @property
    def seconds(self) -> float:
        """The seconds of reading it once."""
        return self.streamed_bytes / self.bytes_per_second


def weights_memory(config: EngineConfig, shape: ModelShape, *, is_host: bool, free: float) -> int | None:
    """Return the bytes that weights may take, or None where all of them stay in memory.

    `free` is what memory is left for them and all else. Raises ParameterError where they do not fit as they are asked
    for.
    """
    if not is_host:
        _refuse_on_a_device(config)
        return None
    if config.weights == "host":
        raise ParameterError(
            "weights must be resident, disk or auto on a processor, got 'host': its memory is the host's; "
            "take weights='disk' (--weights disk)",
            option="weights",
            value="host",
        )
    whole, given = shape.weight_bytes, config.weights_memory
    if config.weights == "resident":
        if given is not None and given < whole:
            raise ParameterError(
                f"weights_memory must hold all weights, {whole:,.0f} bytes, where weights is resident, got {given:,}: "
                "raise it (--weights-memory), or take weights='disk' (--weights disk)",
                option="weights_memory",
                value=given,
            )
        return None
    most = _FITS * free if given is None else given
    if config.weights == "auto" and (whole <= most or config.load_format == "dummy"):
        return None
    memory = int(_STREAMED * free) if given is None else given
    if memory < least_memory(shape):
        unit = "experts" if shape.expert_bytes else "layers"
        raise ParameterError(
            f"weights_memory must hold two {unit} beside what is always in memory, {least_memory(shape):,} bytes, got "
            f"{memory:,}: raise it (--weights-memory), or take a smaller dtype",
            option="weights_memory",
            value=memory,
        )
    return memory


def least_memory(shape: ModelShape) -> int:
    """Return the bytes of what is always in memory, and of the buffers."""
    if shape.expert_bytes:
        kept, count = shape.weight_bytes - shape.expert_bytes, shape.experts * shape.layers
        return int(kept + BUFFERS * shape.expert_bytes / count)
    size = shape.weight_bytes / shape.params_total
    layers = size * shape.params
    return int(shape.weight_bytes - layers + BUFFERS * layers / shape.layers)


def kept_blocks(memory: int, count: int, size: int) -> int:
    """Return how many of so many blocks of a size stay in so much memory; all of them need no buffers."""
    if count * size <= memory:
        return count
    return max(0, memory // max(size, 1) - BUFFERS)


def spread(count: int, kept: int) -> list[bool]:
    """Tell of each block whether it stays, those that stay spread evenly: they give the others the time to come."""
    return [(place + 1) * kept // count > place * kept // count for place in range(count)]


def _refuse_on_a_device(config: EngineConfig) -> None:
    wanted: tuple[WeightsName, ...] = ("host", "disk")
    if config.weights in wanted or config.weights_memory is not None:
        name = "weights" if config.weights in wanted else "weights_memory"
        rule = "be resident or auto on a GPU" if name == "weights" else "be left out on a GPU"
        raise ParameterError(
            f"{name} must {rule}, got {getattr(config, name)!r}: layers stream to a processor only; take --device cpu",
            option=name,
            value=getattr(config, name),
        )
