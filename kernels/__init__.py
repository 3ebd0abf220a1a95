"""Attention over pages, and the fused pieces around it.

The kernels are compiled by numba, read NumPy views of torch's memory, and run on the threads that torch runs on:
both are asked for OpenMP, so that the process has one pool of workers and none of them spins against another.
"""

from __future__ import annotations

import numba

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore[attr-defined]
