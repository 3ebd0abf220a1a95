"""Jobs of every kind, killed at a file operation drawn at random, and work folders corrupted at random.

A fast sample of `benchmarks/jobs/kills_at.py` and `benchmarks/jobs/corruptions.py`, in a process of its own that forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(("program", "option"), [("kills_at", "--operations"), ("corruptions", "--corruptions")])
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_no_row_is_lost_or_twice_or_silently_wrong(tmp_path: Path, program: str, option: str, count: int) -> None:
    command = [
        sys.executable,
        f"benchmarks/jobs/{program}.py",
        option,
        str(count),
        "--seed",
        "5",
        "--folder",
        str(tmp_path),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(ended.stdout)["failures"] == []
    assert ended.returncode == 0
