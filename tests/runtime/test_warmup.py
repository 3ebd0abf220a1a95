"""What is compiled before a job's first row."""

from __future__ import annotations

from llmbatch.runtime.warmup import rehearse
from llmbatch.scheduler.commit import expect_anew
from llmbatch.scheduler.decide import decide_step
from tests.support.compiled import specialisations


def test_a_second_rehearsal_compiles_nothing() -> None:
    rehearse()
    before = [specialisations(function) for function in (decide_step, expect_anew)]
    assert min(before) >= 1
    rehearse()
    assert [specialisations(function) for function in (decide_step, expect_anew)] == before
