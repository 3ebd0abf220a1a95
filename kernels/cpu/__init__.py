"""Kernels for the processor, in numba.

Must not import torch.
Start reading at `attention`.
"""

__all__ = ["attention", "decoder", "dot_tiles", "fused", "layout", "numerics", "products"]
