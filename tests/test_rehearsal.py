"""What is compiled before a job's first row."""

from __future__ import annotations

from llmbatch.advance import expect_anew
from llmbatch.deciding import decide_step
from llmbatch.rehearsal import rehearse


def test_a_second_rehearsal_compiles_nothing() -> None:
    rehearse()
    before = [len(function.signatures) for function in (decide_step, expect_anew)]
    assert min(before) >= 1
    rehearse()
    assert [len(function.signatures) for function in (decide_step, expect_anew)] == before
