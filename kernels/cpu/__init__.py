"""Kernels for the processor, in numba.

Must not import torch.
Start reading at `attention`.
"""
