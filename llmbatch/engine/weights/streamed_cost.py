"""What it costs that weights are fetched at each step, and what the user is told of it."""

from __future__ import annotations

from typing import Final, Literal

from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.residency import with_streamed_weights
from llmbatch.planning.workload import Pool

Source = Literal["disk", "link"]
# By what carries weights to where they are used: where they lie, and what would be faster.
_SOURCES: Final[dict[Source, tuple[str, str]]] = {
    "disk": ("the disk", "a faster disk"),
    "link": ("the host's memory", "weights of fewer bytes (--dtype fp8)"),
}


def streamed_cost(cost: CostModel, streamed: StreamedWeights) -> CostModel:
    """Return the cost of the same model where some of its weights are fetched at each step."""
    return with_streamed_weights(cost, streamed.streamed_bytes, streamed.bytes_per_second)


def streaming_notes(source: Source, pool: Pool, cost: CostModel, streamed: StreamedWeights) -> tuple[str, ...]:
    """Say what comes from where at each step, and where KV holds too few tokens to hide it."""
    where, faster = _SOURCES[source]
    moved, rate = f"{streamed.streamed_bytes / 1e9:.2f} GB", f"{streamed.bytes_per_second / 1e9:.2f} GB/s"
    said = (
        f"weights do not all fit in the memory for them: {streamed.kept_bytes / 1e9:.2f} GB stay there, and {moved} "
        f"come from {where} at each step, at {rate}, beside the computation"
    )
    hidden = streamed.seconds / cost.rates.seconds_per_token
    if hidden <= pool.tokens:
        return (said,)
    return (
        said,
        f"the {source} is too slow for this: {moved} at {rate} take {streamed.seconds:.1f} s, as long as the products "
        f"of {hidden:,.0f} tokens, and KV memory holds {pool.tokens:,}; raise weights_memory or kv_memory "
        f"(--weights-memory, --kv-memory), or take {faster}",
    )
