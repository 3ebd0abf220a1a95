"""The page of benchmarks/clock/rollouts.py: what it says was found is what these rollouts gained."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "clock"


def test_what_was_found_is_of_the_rollouts_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module = runpy.run_path(str(FOLDER / "rollouts.py"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        monkeypatch.delitem(sys.modules, name)  # other folders have one, too
    last = module["Moment"](*(np.array([one]) for one in (8.0, 1.0, 48_000.0)))

    def gains(share: float, rows: int) -> Any:
        split = {"16 spread": share, "8 bits": share + 0.1, "attention": share / 2}
        return module["Gains"](100.0, 0.4, 0.0, split, 0.5, rows, share / 4)

    said = module["found"]([gains(0.2, 32), gains(0.4, 128)], last)
    assert (
        "by 20 to 40 % with *16 spread*, by 30 to 50 % with *8 bits*,\nby 10 to 20 % with *attention*, and by" in said
    )
    assert "and by 0 % with *moved*. The paper says 5 to 10 %. *slower* is 5 to 10 %." in said
    assert "from 32 or 128 rows on" in said
