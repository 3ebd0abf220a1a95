"""What it costs that weights are fetched at each step, foretold or as loaded, and what the user is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from llmbatch.engine.weights.residency import StreamedWeights, kept_blocks
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.residency import BUFFERS, blocks_of, with_streamed_weights
from llmbatch.perf_model.shape import ModelShape

Source = Literal["disk", "link"]
# By what carries weights to where they are used: where they lie, and what would be faster.
_SOURCES: Final[dict[Source, tuple[str, str]]] = {
    "disk": ("the disk", "a faster disk"),
    "link": ("the host's memory", "weights of fewer bytes (--dtype fp8)"),
}


def expected_weights(
    shape: ModelShape, memory: int, rate_of: Callable[[int], float], *, is_host: bool
) -> StreamedWeights | None:
    """Return what each step will fetch where weights get so much memory, None where all will stay there.

    `rate_of` measures the bytes a second by which weights of a size come.

    >>> from llmbatch.perf_model.shape import find_shape
    >>> expected = expected_weights(find_shape("llama-3-8b"), 10_000_000_000, lambda size: 2e9, is_host=True)
    >>> f"{expected.kept_bytes / 1e9:.1f} GB stay, {expected.streamed_bytes / 1e9:.1f} come in {expected.seconds:.1f} s"
    '9.5 GB stay, 7.5 come in 3.8 s'
    """
    count, size, around = blocks_of(shape, is_host=is_host)
    kept = kept_blocks(memory - int(around), count, int(size))
    if kept == count:
        return None
    moved = int((count - kept) * size)
    return StreamedWeights(int(around + (kept + BUFFERS) * size), moved, rate_of(moved))


def streamed_cost(source: Source, cost: CostModel, streamed: StreamedWeights) -> CostModel:
    """Return the cost of the same model where some of its weights are fetched at each step.

    Over a link come whole layers, whatever experts a step's tokens choose, and products hide what comes beside them,
    which is law `bytes`.
    """
    if source == "link":
        cost = replace(cost, law="bytes", shape=replace(cost.shape, expert_bytes=0.0))
    return with_streamed_weights(cost, streamed.streamed_bytes, streamed.bytes_per_second)


def streaming_notes(
    source: Source,
    kv_tokens: int,
    cost: CostModel,
    streamed: StreamedWeights,
    *,
    host_may_attend: bool = False,
) -> tuple[str, ...]:
    """Say what comes from where at each step, and where KV memory, of so many tokens, has too few to hide it.

    `host_may_attend`: keys and values lie on the device, and could lie in its host's memory.
    """
    where, faster = _SOURCES[source]
    if host_may_attend:
        faster += ", or keys and values in the host's memory (--kv host)"
    moved, rate = f"{streamed.streamed_bytes / 1e9:.2f} GB", f"{streamed.bytes_per_second / 1e9:.2f} GB/s"
    said = (
        f"weights do not all fit in the memory for them: {streamed.kept_bytes / 1e9:.2f} GB stay there, and {moved} "
        f"come from {where} at each step, at {rate}, beside the computation"
    )
    hidden = streamed.seconds / cost.rates.seconds_per_token
    if hidden <= kv_tokens:
        return (said,)
    return (
        said,
        f"the {source} is too slow for this: {moved} at {rate} take {streamed.seconds:.1f} s, as long as the products "
        f"of {hidden:,.0f} tokens, and KV memory holds {kv_tokens:,}; raise weights_memory or kv_memory "
        f"(--weights-memory, --kv-memory), or take {faster}",
    )
