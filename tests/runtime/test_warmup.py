"""What is compiled before a job's first row."""

from __future__ import annotations

import fcntl

import pytest

from llmbatch.compilation.decorators import code_folder
from llmbatch.runtime import warmup
from llmbatch.runtime.warmup import compile_phases, rehearse
from llmbatch.scheduler.commit import expect_anew
from llmbatch.scheduler.decide import LATER_PHASES, decide_step
from tests.support.compiled import specialisations


def test_a_second_rehearsal_compiles_nothing() -> None:
    rehearse()
    before = [specialisations(function) for function in (decide_step, expect_anew)]
    assert min(before) >= 1
    rehearse()
    assert [specialisations(function) for function in (decide_step, expect_anew)] == before


def test_phases_that_a_waiting_job_compiles_are_those_of_a_step() -> None:
    """Other types would be compiled in vain: a step would have its own."""
    compile_phases(until=lambda: False)
    rehearse()
    assert [specialisations(phase) for phase in LATER_PHASES] == [1] * len(LATER_PHASES)


def test_a_waiting_job_compiles_nothing_once_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LATER_PHASES", (None,))
    compile_phases(until=lambda: True)


def test_of_jobs_that_wait_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LATER_PHASES", (None,))
    with (code_folder() / "phases.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_phases(until=lambda: False)
