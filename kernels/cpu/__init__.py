"""Kernels for the processor, in numba.

Must not import torch.
Start reading at `attention`.
"""

__all__ = ["attention", "blocks", "decoder", "dot_tiles", "fused", "layout", "numerics", "products", "vector_ir"]
