"""Jobs of every kind, killed at a file operation drawn at random, and work folders corrupted at random.

A fast sample of `benchmarks/jobs/kills_at.py` and `benchmarks/jobs/corruptions.py`, in a process of its own that forks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.killing import Process, run


@pytest.mark.parametrize(("program", "option"), [("kills_at", "--operations"), ("corruptions", "--corruptions")])
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_no_row_is_lost_or_twice_or_silently_wrong(tmp_path: Path, program: str, option: str, count: int) -> None:
    command = [option, str(count), "--seed", "5", "--folder", str(tmp_path)]
    ended = run(Process(command, program=f"benchmarks.jobs.{program}:main"))
    assert json.loads(ended.printed)["failures"] == []
    assert ended.status == 0
