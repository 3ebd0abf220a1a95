"""What is compiled before a job's first row."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
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


def test_a_hurried_process_makes_way_again_once_no_job_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice, seen = [0], []
    monkeypatch.setattr(warmup, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(warmup, "_share", lambda process, nice: None)
    monkeypatch.setattr(os, "getpriority", lambda which, process: nice[-1])
    monkeypatch.setattr(os, "setpriority", lambda which, process, value: nice.append(value))

    def hurried() -> None:
        seen.append(nice[-1])
        warmup._hurry(os.getpid())
        seen.append(nice[-1])

    monkeypatch.setattr(warmup, "rehearse", hurried)
    monkeypatch.setattr(warmup, "rehearse_forecast", lambda: seen.append(nice[-1]))
    warmup.main()
    assert seen == [10, 0, 10]


def test_of_jobs_that_wait_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_later", lambda: [(None, ())])
    with (code_folder() / "later.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_later(until=lambda: False)
