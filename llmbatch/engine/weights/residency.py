"""Decides where the weights of layers lie: all in memory, or some where each step fetches them.

A processor reads them from a file, a GPU copies them from the memory of its host.

Memory that is given for weights holds what is around the layers first, then the buffers through which layers come, then
as many layers as fit. So half the memory leaves half the layers to be fetched. Of a mixture a processor reads only
experts: they are most of it, and attention is needed by every token. To a GPU its layers come whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmbatch.choices import WeightsName
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.perf_model.residency import BUFFERS, blocks_of
from llmbatch.perf_model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """What a step reads of the weights, and how fast it comes."""

    kept_bytes: int  # in memory, with the buffers
    streamed_bytes: int  # in the file, or in the memory of a GPU's host
    bytes_per_second: float  # of fetching them, measured

    @property
    def seconds(self) -> float:
        """The seconds of fetching them once."""
        return self.streamed_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class _Rules:
    """What holds for weights on a kind of device.

    Each byte that does not stay is fetched at every step. A GPU's own memory is far faster than the link to its host:
    so weights stay if they can, and if they cannot, KV of more sequences is worth more than some layers that need not
    come.
    """

    device: str
    refused: WeightsName  # what cannot be asked for
    because: str
    other: WeightsName  # what can, in its place
    fits: float  # of the memory that is free, what weights may take that all stay there
    share: float  # of it, what they get where they do not fit


_BESIDE_STEPS: Final = 0.5  # of a GPU's free memory, what weights get that do not fit beside the steps alone
_RULES: Final = {  # by whether the device is a processor
    True: _Rules("processor", "host", "its memory is the host's", "disk", fits=0.85, share=0.5),
    False: _Rules("GPU", "disk", "layers come to it from the memory of its host", "host", fits=0.93, share=0.25),
}


def weights_memory(config: EngineConfig, shape: ModelShape, *, is_host: bool, free: float) -> int | None:
    """Return the bytes that weights may take, or None where all of them stay in memory.

    `free` is what memory is left for them and all else. Raises ParameterError where they do not fit as they are asked
    for.
    """
    rules = _RULES[is_host]
    other = rules.other
    if config.weights == rules.refused:
        raise ParameterError(
            f"weights must be resident, {other} or auto on a {rules.device}, got {config.weights!r}: {rules.because}; "
            f"take weights={other!r} (--weights {other})",
            option="weights",
            value=config.weights,
        )
    whole, given = shape.weight_bytes, config.weights_memory
    if given is not None and given > free and not is_host:
        raise ParameterError(
            f"weights_memory must be at most what is free of the GPU, {int(free):,} bytes, got {given:,}: "
            "lower it (--weights-memory)",
            option="weights_memory",
            value=given,
        )
    if config.weights == "resident":
        if given is not None and given < whole:
            raise ParameterError(
                f"weights_memory must hold all weights, {whole:,.0f} bytes, where weights is resident, got {given:,}: "
                f"raise it (--weights-memory), or take weights={other!r} (--weights {other})",
                option="weights_memory",
                value=given,
            )
        return None
    least = least_memory(shape, is_host=is_host)
    if given is not None and is_host:
        given = min(given, max(int(whole), least))  # more is not needed, and left to keys and values
    pages = config.kv_memory if config.kv == "device" else None  # bytes beside the weights; None: as they are left
    alone = rules.fits * free if given is None else given  # whatever KV takes
    most = min(alone, free - (pages or 0)) if given is None else given
    if config.weights == "auto" and (whole <= most or config.load_format == "dummy"):
        return None
    # A processor needs memory beside weights and KV: for what is converted, packed and kept of files.
    share = rules.share * free if is_host or pages is None else most
    if config.kv == "host":
        share = _BESIDE_STEPS * free
    unit = "experts" if shape.expert_bytes and is_host else "layers"
    if alone < least:
        raise ParameterError(
            f"weights_memory must hold two {unit} beside what is always in memory, {least:,} bytes, got "
            f"{int(alone):,}: raise it (--weights-memory), or take a smaller dtype",
            option="weights_memory",
            value=int(alone),
        )
    if most < least:
        raise ParameterError(
            f"kv_memory must be at most {int(free) - least:,} bytes, what two {unit} and what is always in memory "
            f"leave of {int(free):,} that are free, got {pages:,}: lower it (--kv-memory)",
            option="kv_memory",
            value=pages,
        )
    return int(min(max(share, least), most)) if given is None else given


def least_memory(shape: ModelShape, *, is_host: bool) -> int:
    """Return the bytes of what is always in memory, and of the buffers."""
    blocks = blocks_of(shape, is_host=is_host)
    return int(blocks.around + BUFFERS * blocks.size)


def kept_blocks(memory: int, count: int, size: int) -> int:
    """Return how many of so many blocks of a size stay in so much memory; all of them need no buffers."""
    if count * size <= memory:
        return count
    return max(0, memory // max(size, 1) - BUFFERS)


def spread(count: int, kept: int) -> list[bool]:
    """Tell of each block whether it stays, those that stay spread evenly: they give the others the time to come."""
    return [(place + 1) * kept // count > place * kept // count for place in range(count)]
