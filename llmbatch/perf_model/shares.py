"""What of a model's layers is split evenly between devices that share it: heads, and inner widths."""

from __future__ import annotations

from collections.abc import Iterator

from llmbatch.perf_model.shape import configs_of_layers, read_field


def fitting_ranks(config: object) -> list[int]:
    """List the numbers of devices that heads and inner widths are whole multiples of, by a transformers config.

    >>> from types import SimpleNamespace
    >>> fitting_ranks(SimpleNamespace(num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4))
    [1, 2, 4]
    """
    counts = [count for _, count in shared_counts(config)]
    return [n for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts)]


def shared_counts(config: object) -> list[tuple[str, int]]:
    """List how many there are of what devices share, and what that is, of all layers of a transformers config."""
    return list(dict.fromkeys(count for layer in configs_of_layers(config) for count in _counts(layer)))


def _counts(layer: object) -> Iterator[tuple[str, int]]:
    heads = read_field(layer, "num_attention_heads", "n_head")
    yield "query heads", heads
    yield "KV heads", read_field(layer, "num_key_value_heads") or heads
    for what, name in (("elements of an MLP", "intermediate_size"), ("elements of an expert", "moe_intermediate_size")):
        if count := read_field(layer, name):
            yield what, count
