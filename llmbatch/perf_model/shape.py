"""What a transformers config says of a model's shape: layers that route to experts, windows of attention.

Configs are read duck-typed, since model families name and omit fields as they like.
"""

from __future__ import annotations

from typing import Any, Final

# Decoder families whose feed-forward has two matrices, not the gated three.
UNGATED: Final = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"}
)


def read_field(config: object, *names: str, default: Any = None) -> Any:
    """Return the first of the named fields that the config has and that is not None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def count_sparse_layers(config: object, layers: int) -> int:
    """Count how many layers route to experts."""
    dense = set(read_field(config, "mlp_only_layers", default=()))
    dense.update(range(int(read_field(config, "first_k_dense_replace", default=0))))
    every = int(read_field(config, "decoder_sparse_step", default=1))
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)


def read_windows(config: object, layers: int) -> tuple[int, ...]:
    """Return the tokens that each layer looks back, [layers]; 0: all."""
    window = read_field(config, "sliding_window", default=0)
    if not read_field(config, "use_sliding_window", default=True):
        window = 0
    types = read_field(config, "layer_types")
    if types is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)
