"""Kernels for a GPU, in Triton.

Must not import `kernels.cpu`.
Start reading at `backend`.
"""

__all__ = ["argmax", "backend", "draw", "fp8", "fused"]
