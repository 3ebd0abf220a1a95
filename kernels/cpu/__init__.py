"""Kernels for the processor, in numba.

Must not import torch.
Start reading at `attention`.
"""

__all__ = [
    "attention",
    "blocks",
    "decoder",
    "endings",
    "fused",
    "groups",
    "layout",
    "numerics",
    "pointers",
    "products",
    "vector_ir",
]
