"""Kernels for the processor, in numba.

Must not import torch.
Start reading at `attention`.
"""

__all__ = [
    "attention",
    "blocks",
    "decoder",
    "decoder_inputs",
    "fused",
    "groups",
    "layout",
    "numerics",
    "pointers",
    "products",
    "workers",
]
