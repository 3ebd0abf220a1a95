"""Runs a model on a GPU, which is waited for only for its tokens.

Must not import `engine.cpu`.
Start reading at `engine`.
"""

__all__ = ["attention", "engine", "fp8_linear", "graphs", "strategies"]
