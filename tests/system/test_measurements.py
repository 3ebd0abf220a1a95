"""What was measured of this processor, and whether it was by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmbatch.system.measurements import keep_figures, recalled, recalled_figures, remembered


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has others take so many seconds of each processor whenever it is asked."""
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path))

    def set_to(seconds: float) -> None:
        taken = _counting(seconds)
        monkeypatch.setattr("llmbatch.system.measurements._seconds_of_others", lambda: next(taken))

    return set_to


def _counting(step: float) -> Iterator[float]:
    total = 0.0
    while True:
        yield total
        total += step


def test_a_figure_is_measured_again_until_nothing_else_runs(busy: Callable[[float], None]) -> None:
    figures = iter((1.0, 2.0, 3.0, 4.0))

    def ask() -> float:
        return remembered("flops", lambda: next(figures), "1.0")

    busy(100.0)
    assert [ask(), ask()] == [1.0, 1.0]  # what others disturbed is not replaced by its like
    assert recalled("flops", "1.0") == 1.0
    busy(0.0)
    assert [ask(), ask()] == [3.0, 3.0]
    busy(100.0)
    assert ask() == 3.0
    assert recalled("flops", "1.0") == 3.0


def test_a_figure_of_an_earlier_version_is_measured_again(busy: Callable[[float], None], tmp_path: Path) -> None:
    busy(0.0)
    remembered("flops", lambda: 1.0)
    (file,) = (tmp_path / "processors").iterdir()
    file.write_text("7.0")
    assert recalled("flops") is None
    assert remembered("flops", lambda: 2.0) == 2.0


def test_figures_that_a_job_found_are_kept_until_the_next_finds_others(busy: Callable[[float], None]) -> None:
    busy(0.0)
    assert recalled_figures("steps", "model") is None
    keep_figures("steps", {"compute": 1.0}, "model")
    keep_figures("steps", {"compute": 2.0, "share": 0.5}, "model")
    assert recalled_figures("steps", "model") == {"compute": 2.0, "share": 0.5}
    assert recalled_figures("steps", "another") is None
