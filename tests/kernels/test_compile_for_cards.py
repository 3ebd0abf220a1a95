"""Kernels compile for cards that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Shared memory of a block, in bytes, by compute capability.
LIMITS = {80: 163 << 10, 90: 227 << 10}
TILE_BYTES = 64 * 128 * 2  # of keys, and of values


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compilation", str(capability)]
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    shared = json.loads(told)
    assert max(shared.values()) <= LIMITS[capability]
    # Two tiles of keys and of values are on their way while one is attended.
    assert shared["attend bf16 128 one"] >= 4 * TILE_BYTES
