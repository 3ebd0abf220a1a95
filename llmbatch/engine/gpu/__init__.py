"""Runs a model on a GPU, which is waited for only for its tokens.

Must not import `engine.cpu`.
Start reading at `engine`.
"""

__all__ = [
    "attention",
    "batch",
    "engine",
    "execution",
    "followers",
    "fp8_linear",
    "graphs",
    "step_forward",
    "strategies",
]
