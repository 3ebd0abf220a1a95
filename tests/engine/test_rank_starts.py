"""Ranks load side by side, start again where one was killed meanwhile, and end with a sentence where one cannot."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmbatch import JobError, ModelError
from llmbatch.engine.ranks import processes as rank_processes
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.ranks.teams import RankTeams
from llmbatch.system import processes
from tests.engine.test_ranks import ROWS, answers, operator_of
from tests.support.models import tiny_model_folder

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each rank is killed as soon as its process is there; those behind are not."""
    start, killed = processes.start_fed, list[bool]()

    def start_and_kill(*given: Any) -> Any:
        process = start(*given)
        if killed and killed.pop(0):
            process.kill()
        return process

    monkeypatch.setattr(rank_processes, "start_fed", start_and_kill)
    return killed


def test_a_rank_that_is_killed_while_it_loads_is_started_again(
    tmp_path: Path, kills: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    kills.append(True)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        table = answers(tiny_model_folder(tmp_path, "qwen2"), tensor_parallel=2, max_tokens=2)
    assert caplog.messages == [
        "rank 1 of 2 ended by signal 9 before it had loaded the model: the ranks are started again"
    ]
    assert table["error"].null_count == len(table)


def test_ranks_that_are_killed_whenever_they_load_end_the_job(tmp_path: Path, kills: list[bool]) -> None:
    kills += [True] * 3
    with pytest.raises(JobError) as raised:
        answers(tiny_model_folder(tmp_path, "qwen2"), tensor_parallel=2, max_tokens=2)
    assert str(raised.value) == (
        "the ranks of tensor_parallel=2 must all start, and rank 1 of 2 ended by signal 9 3 times: if memory ran out, "
        "take fewer ranks or a smaller dtype"
    )


def test_a_rank_that_finds_other_weights_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are replaced once it has loaded them, and before the first rank does."""
    folder = tiny_model_folder(tmp_path, "qwen2")
    begin = RankTeams.begin

    def begin_and_replace(teams: RankTeams, processes: RankProcesses) -> None:
        begin(teams, processes)
        teams.wait()
        (tmp_path / "model.safetensors").touch()

    monkeypatch.setattr(RankTeams, "begin", begin_and_replace)
    with pytest.raises(JobError) as raised:
        answers(folder, tensor_parallel=2, max_tokens=2)
    assert str(raised.value) == (
        f"the ranks of tensor_parallel=2 must all start, and rank 1 of 2 ended: the files in model folder {folder!r} "
        "must stay as they are while processes load them, but they have changed: run the job again"
    )


def test_ranks_end_where_the_first_one_cannot_load_and_others_start_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator = operator_of(tiny_model_folder(tmp_path, "qwen2"), tensor_parallel=2, max_tokens=2)
    file, begin, started = tmp_path / "model.safetensors", RankTeams.begin, list[subprocess.Popen[bytes]]()
    whole = file.read_bytes()

    def begin_and_spoil(teams: RankTeams, processes: RankProcesses) -> None:
        begin(teams, processes)
        started.extend(processes.started)
        file.write_bytes(b"no weights")

    with monkeypatch.context() as patch:
        patch.setattr(RankTeams, "begin", begin_and_spoil)
        with pytest.raises(ModelError):
            operator(ROWS)
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    file.write_bytes(whole)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        assert operator(ROWS)["error"].null_count == len(ROWS)
    assert caplog.messages == []


def test_ranks_that_cannot_be_started_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("there are too many processes")

    monkeypatch.setattr(rank_processes, "start_fed", refuse)
    with pytest.raises(JobError) as raised:
        answers(tiny_model_folder(tmp_path, "qwen2"), tensor_parallel=2)
    assert str(raised.value) == "the ranks of tensor_parallel=2 must all start, and there are too many processes"
