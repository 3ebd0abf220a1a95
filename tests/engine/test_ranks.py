"""A model that is split over ranks gives what one process gives, and outlives the death of a rank."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from llmbatch import LLMOperator, ParameterError
from llmbatch.engine.cpu.threads import threads_told
from llmbatch.engine.ranks import team
from llmbatch.engine.ranks.collectives import share_of
from llmbatch.engine.ranks.cpu import first
from llmbatch.engine.ranks.cpu.engine import RankedCpuEngine
from llmbatch.engine.ranks.plan import check_cores
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.scheduler.output import Step, StepResult
from tests.support.models import tiny_model_folder
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")

ROWS = pa.table({"prompt": [f"row {i} says {'x' * (i % 17)}" for i in range(24)]})
# Kills itself once the other rank has got a step: that one computes, and waits for the sums of one that is no more.
KILLED_IN_A_STEP = """
import os, signal, sys
from llmbatch.engine.ranks.cpu.messages import RankStep
from llmbatch.engine.ranks.team import RankTeam
from tests.engine.test_ranks import answers
tell = RankTeam.tell
def tell_and_die(team, message):
    tell(team, message)
    if isinstance(message, RankStep):
        print(team.pids[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
RankTeam.tell = tell_and_die
answers(sys.argv[1], tensor_parallel=2)
"""
FAMILIES = ("qwen2", "gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.slow))


def do_nothing() -> None:
    """Stand for what a rank does."""


def operator_of(folder: str, **options: Any) -> LLMOperator:
    common: dict[str, Any] = {"prompt": "prompt", "max_tokens": 6, "dtype": "float32", "kv_memory": 2**24}
    return LLMOperator(model=folder, **{**common, **options})


def answers(folder: str, **options: Any) -> pa.Table:
    table: pa.Table = operator_of(folder, **options)(ROWS)
    return table


def signal_once(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *, step: int = 0) -> list[int]:
    """Send the second rank a signal before that step, once; returns its process when that was done."""
    execute, sent = RankedCpuEngine.execute, list[int]()

    def send_once(engine: RankedCpuEngine, given: Step) -> StepResult:
        if given.index == step and not sent:
            sent.append(engine.pids[0])
            os.kill(engine.pids[0], number)
        return execute(engine, given)

    monkeypatch.setattr(RankedCpuEngine, "execute", send_once)
    return sent


@contextmanager
def noting_logits(noted: list[NDArray[np.float32]]) -> Iterator[None]:
    """Note the logits of all rows that are sampled, in the order of steps."""
    engine: Any = import_module("llmbatch.engine.cpu.engine")
    choose = engine.choose_tokens

    def note(logits: NDArray[np.float32], *given: Any) -> Any:
        noted.append(logits.copy())
        return choose(logits, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "choose_tokens", note)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_logits_of_one_process(tmp_path: Path, family: str) -> None:
    folder = tiny_model_folder(tmp_path, family)
    noted: dict[int, list[NDArray[np.float32]]] = {1: [], 2: []}
    texts = []
    for ranks, logits in noted.items():
        with noting_logits(logits):
            table = answers(folder, tensor_parallel=ranks, step_tokens=256, order="input")
        texts.append(table["generated_text"].to_pylist())
    assert texts[0] == texts[1]
    alone, split = (np.concatenate(logits) for logits in noted.values())
    assert float(np.abs(alone - split).max()) < 1e-4 * float(np.abs(alone).max())


def test_two_ranks_take_the_type_that_the_processor_multiplies(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "qwen2")
    table = answers(folder, tensor_parallel=2, dtype="int8", max_tokens=2)
    assert table["error"].null_count == len(table)


def test_rows_of_a_rank_that_dies_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model_folder(tmp_path, "qwen2")
    killed = signal_once(monkeypatch, signal.SIGKILL, step=3)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        table = answers(folder, tensor_parallel=2, max_tokens=7)
    assert len(killed) == 1
    assert caplog.messages == ["rank 1 of 2 ended by signal 9: the rows of its step run again on new ranks"]
    assert table["error"].null_count == len(table)
    assert table["generated_text"].equals(answers(folder, max_tokens=7)["generated_text"])


def test_a_rank_that_is_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All others wait for it, and neither a signal nor a deadline would be noticed."""
    folder = tiny_model_folder(tmp_path, "qwen2")
    monkeypatch.setattr(team, "_STOPPED_S", 0.0)
    monkeypatch.setattr(team, "_LOOK_S", 0.01)
    signal_once(monkeypatch, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        table = answers(folder, tensor_parallel=2, max_tokens=2)
    assert caplog.messages == [
        "rank 1 was stopped for 0 seconds, and is ended",
        "rank 1 of 2 ended by signal 9: the rows of its step run again on new ranks",
    ]
    assert table["error"].null_count == len(table)


def test_the_rank_that_was_first_to_end_is_named() -> None:
    """Another one ends since it waits in vain."""
    program = "from llmbatch.engine.ranks.reports import RankLost, reporting\nwith reporting():\n    raise {}"
    said = ("RankLost('a rank does not answer')", "MemoryError('no room')")
    started = [
        subprocess.Popen([sys.executable, "-c", program.format(error)], stdin=PIPE, stdout=PIPE, cwd=ROOT)
        for error in said
    ]
    for process in started:
        process.wait()
    there = object.__new__(RankProcesses)
    there.started = started
    ranks = RankTeam(there, [do_nothing] * 2, join=do_nothing, leave=do_nothing)
    assert str(ranks.lost()) == "rank 2 of 3 ended: no room"
    for process in started:
        process.communicate()
    assert str(ranks.lost()) == "rank 2 of 3 ended: no room", "it is known from then on"


@pytest.mark.parametrize("lacking", ["memfd_create", "pidfd_open"])
def test_ranks_run_on_a_python_that_was_built_for_older_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.delattr(os, lacking)
    folder = tiny_model_folder(tmp_path, "qwen2")
    signal_once(monkeypatch, signal.SIGKILL)
    table = answers(folder, tensor_parallel=2, max_tokens=2)
    assert table["error"].null_count == len(table)


@pytest.mark.slow
def test_a_rank_ends_when_the_first_one_is_killed_in_a_step(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_IN_A_STEP, tiny_model_folder(tmp_path, "qwen2")]
    first = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert first.returncode == -signal.SIGKILL
    with suppress(ProcessLookupError):  # it has ended, and nothing of it is left
        other = os.pidfd_open(int(first.stdout))
        ended, _, _ = select.select([other], [], [], 60)
        os.close(other)
        assert ended


def test_heads_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "qwen2")
    config = tmp_path / "config.json"
    config.write_text(re.sub(r'"num_key_value_heads": \d+', '"num_key_value_heads": 3', config.read_text()))
    message = f"tensor_parallel must divide the 3 KV heads of model {folder!r}, got 2: take 1 (--tensor-parallel)"
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$"):
        answers(folder, tensor_parallel=2)


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(
        ParameterError, match=r"^tensor_parallel must be at most 2, the cores that this process may use, got 3$"
    ):
        check_cores(3, cores=2)


def test_ranks_share_the_threads_that_the_process_was_told_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "threads_told", lambda: 5)
    assert [first.threads_of(ranks) for ranks in (1, 2, 5, 8)] == [5, 2, 1, 1]


def test_what_a_process_was_told_stays_when_its_threads_are_fewer() -> None:
    told = threads_told()
    torch.set_num_threads(told + 1)
    try:
        assert threads_told() == told
    finally:
        torch.set_num_threads(told)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel must be 1 for engine='simulated', which has no weights, got 2"),
        ({"weights": "disk"}, "weights must be auto or resident for engine='simulated', which has none, got 'disk'"),
        ({"weights_memory": 9}, "weights_memory must be left out for engine='simulated', which has none, got 9"),
        ({"kv": "host"}, "kv must be device for engine='simulated', which has none and no host beside it, got 'host'"),
    ],
)
def test_the_simulated_engine_has_no_weights(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        answers(str(tmp_path), engine="simulated", **given)


def test_ranks_keep_what_they_have(tmp_path: Path) -> None:
    said = "weights_memory must be left out where tensor_parallel is above 1, since each rank keeps its share, got 9"
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        answers(str(tmp_path), tensor_parallel=2, weights_memory=9)


def test_the_ranks_share_a_vocabulary_that_they_do_not_divide() -> None:
    shares = [share_of(rank, 3, 7) for rank in range(3)]
    assert np.concatenate([np.array(share) for share in shares]).tolist() == list(range(7))
