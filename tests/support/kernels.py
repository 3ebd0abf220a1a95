"""Compiles the kernels that most tests run, in a process beside their collection; `main` is what it calls."""

from __future__ import annotations

import numpy as np

from llmbatch.engine.cpu import compile_ahead
from llmbatch.engine.cpu.compilation import compile_kernels
from tests.engine.test_sampler import draw


def main() -> None:
    """Compile what is called by address, then all else of a step in float32, then the sampler."""
    compile_ahead.main("float32", "auto")
    compile_kernels("float32", "auto")
    draw(np.zeros((1, 8)))
