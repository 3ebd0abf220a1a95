"""What is compiled before a job's first row."""

from __future__ import annotations

import fcntl
from typing import Any

import pytest

from llmbatch.compilation.decorators import code_folder
from llmbatch.runtime import warmup
from llmbatch.runtime.warmup import compile_later, rehearse
from llmbatch.scheduler.beside.guest_steps import decide_prompts
from llmbatch.scheduler.commit import advance, expect_anew
from llmbatch.scheduler.decide import LATER_PHASES, decide_step
from tests.support.compiled import specialisations


def test_a_second_rehearsal_compiles_nothing() -> None:
    rehearse()
    before = [specialisations(function) for function in (decide_step, expect_anew)]
    assert min(before) >= 1
    rehearse()
    assert [specialisations(function) for function in (decide_step, expect_anew)] == before


@pytest.mark.parametrize("function", [*LATER_PHASES, advance, decide_prompts])
def test_what_a_waiting_job_compiles_is_what_steps_call(function: Any) -> None:
    """Other types would be compiled in vain: a step would have its own."""
    compile_later(until=lambda: False)
    rehearse()
    assert specialisations(function) == 1


def test_a_waiting_job_compiles_nothing_once_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_later", lambda: [(None, ())])
    compile_later(until=lambda: True)


def test_of_jobs_that_wait_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_later", lambda: [(None, ())])
    with (code_folder() / "later.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_later(until=lambda: False)
