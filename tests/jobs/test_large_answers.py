"""Answers whose text does not fit in one chunk of a column: a job goes on with them and writes them."""

from __future__ import annotations

import pytest

from llmbatch.inference.answers import assembler
from llmbatch.io import gather
from tests.support.jobs import Job, check_goes_on


@pytest.mark.parametrize("options", [{}, {"preserve_order": False, "id_column": "id"}], ids=["in order", "as finished"])
def test_a_killed_job_whose_text_comes_in_pieces_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    job = job.having(window_rows=60, **options)
    expected = job.undisturbed()
    monkeypatch.setattr(assembler, "TEXT_AT_ONCE", 40)
    monkeypatch.setattr(gather, "MOST_BYTES", 200)
    job.run_until(25)
    check_goes_on(job, expected)
