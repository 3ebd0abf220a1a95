"""Runs a model on a GPU, which is waited for only for its tokens.

Must not import `engine.cpu`.
Start reading at `engine`.
"""

__all__ = ["attention", "cuda_graphs", "engine", "fp8_linear", "mixed_graphs", "strategies"]
