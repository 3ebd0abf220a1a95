"""Keeps the tokens that each slot has generated, and what their rows ask for: draws, ends and stop strings.

Must not import models or kernels.
Start reading at `buffers`.
"""

__all__ = ["buffers", "seeds", "stop_strings"]
