"""A model that is split over devices gives the answers of one, and outlives the death of a rank.

The devices are a processor that interprets the kernels, and the ranks meet by gloo: what the first rank tells others,
and when, is the same on GPUs.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import socket
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

pytest.importorskip("triton")

from llmbatch import LLMOperator
from llmbatch.engine.calibration.device_cost import cost_model
from llmbatch.engine.factory import EngineFactory
from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.graphs import recorder
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks import processes
from llmbatch.engine.ranks.gpu import meeting as meeting_module
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.engine import RankedGpuEngine
from llmbatch.engine.ranks.gpu.first import first_of_gpus, ranked_engine, teams_on_gpus
from llmbatch.engine.ranks.gpu.meeting import Meeting
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.engine.ranks.reports import RankLost
from llmbatch.engine.ranks.teams import RankTeams
from llmbatch.errors import JobError, ParameterError
from llmbatch.inference.options import Options
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.planning.workload import Pool
from llmbatch.scheduler.admission_order import Blend
from llmbatch.scheduler.output import Step, StepResult
from tests.engine.gpu.test_engine import ASKED, LAYERS, MAX_TOKENS, assert_told, prompts
from tests.engine.gpu.test_execution import Again
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

HOST = torch.device("cpu")
ALONE = Platform(HOST, GpuOps(HOST), PAGE_SIZE, max_running=512)

RECORDERS: list[Again] = []  # that this process has made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices wherever a GPU is asked for, as many as there are ranks; processors elsewhere."""
    import llmbatch.engine.devices

    find = llmbatch.engine.devices.find_platform

    def found(device: str, ranks: int = 1, kv: Any = "device") -> Platform:
        if device != "cuda":
            return find(device, ranks, kv)
        return ALONE if ranks == 1 else first_of_gpus(ALONE, ranks)

    monkeypatch.setattr("llmbatch.engine.devices.find_platform", found)


def answers(folder: str, rows: pa.Table, **options: Any) -> pa.Table:
    common: dict[str, Any] = {"prompt": "text", "max_tokens": 6, "dtype": "float32", "kv_memory": 2**20, "page_size": 8}
    operator = LLMOperator(model=folder, **{**common, **options})
    table: pa.Table = operator(rows)
    return table


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_rows_of_every_kind_are_answered_as_on_a_processor(tmp_path: Path, family: str) -> None:
    """Scored prompts, forks and steps that the host samples go to all ranks too."""
    pytest.importorskip("llguidance")
    folder = tiny_model_folder(tmp_path, family, layers=LAYERS)
    rows = pa.table(
        {
            "text": [f"{'abc' * (i % 3)} row {i}" for i in range(len(ASKED))],
            "params": [json.dumps(one) for one in ASKED],
        }
    )
    expected = answers(folder, rows, sampling_params="params")
    found = answers(folder, rows, sampling_params="params", device="cuda", tensor_parallel=2)
    assert expected["error"].null_count == rows.num_rows
    for name in expected.column_names:
        assert_told(found[name].to_pylist(), expected[name].to_pylist())


def test_ranks_repeat_what_all_have_recorded(tmp_path: Path) -> None:
    folder, rows = tiny_model_folder(tmp_path, "llama", layers=LAYERS), prompts()
    expected = generate(tiny_model("llama", layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded, teams = two_ranks(folder)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    golden.num_pages = 60
    pages = {"num_pages": golden.num_pages, "window_pages": 0, "page_size": 4}
    engine = ranked_engine(loaded, TritonAttention(HOST), teams, pages, recorder=new_recorder)
    engine.record(range(1, 4), (16,))
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected
    assert RECORDERS.pop().repeated > 0


def test_rows_of_a_rank_that_dies_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that lost it is gone before the next one is built: a GPU has no room for both."""
    folder = tiny_model_folder(tmp_path, "llama", layers=LAYERS)
    rows = pa.table({"text": [f"row {i}" for i in range(3)]})
    build, submit = EngineFactory._ranked, RankedGpuEngine.submit
    killed, alive = list[int](), list[int]()
    made = list[weakref.ref[RankedGpuEngine]]()

    def note(*given: Any, **named: Any) -> RankedGpuEngine:
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        engine = build(*given, **named)
        made.append(weakref.ref(engine))
        return engine

    def kill_once(engine: RankedGpuEngine, step: Step) -> StepResult | None:
        if step.index == 2 and not killed:
            killed.append(engine.pids[0])
            os.kill(engine.pids[0], signal.SIGKILL)
        return submit(engine, step)

    monkeypatch.setattr(EngineFactory, "_ranked", note)
    monkeypatch.setattr(RankedGpuEngine, "submit", kill_once)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        found = answers(folder, rows, device="cuda", tensor_parallel=2, max_tokens=4)
    assert len(killed) == 1
    assert alive == [0, 0]
    assert caplog.messages == ["rank 1 of 2 ended by signal 9: the rows of its step run again on new ranks"]
    assert found["generated_text"].equals(answers(folder, rows, max_tokens=4)["generated_text"])


def recording_factory(folder: str, teams: RankTeams, golden: Golden) -> EngineFactory:
    described = describe_model(folder, dtype="float32", device=HOST)
    return EngineFactory(
        Pool(golden.num_pages, 4),
        cost_model(ALONE, described, Options.build(model=folder, prompt="text", max_tokens=1)),
        TritonAttention(HOST),
        records=True,
        max_running=2,
        teams=teams,
    )


@pytest.mark.slow
def test_nothing_is_recorded_where_one_rank_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows = tiny_model_folder(tmp_path, "llama", layers=LAYERS), prompts()[:2]
    expected = generate(tiny_model("llama", layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded, teams = two_ranks(folder)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    monkeypatch.setattr(recorder, "GraphRecorder", new_recorder)
    monkeypatch.setattr(Again, "record", refuse)  # here, and not on the other rank
    with caplog.at_level(logging.WARNING, "llmbatch"):
        engine = recording_factory(folder, teams, golden).engine(loaded, None, None)
    assert caplog.messages == ["small steps are not recorded as CUDA graphs, and take longer: it waits"]
    assert golden.run(engine, Blend(0.1, 0.2), 16) == expected


@pytest.mark.slow
def test_steps_are_recorded_again_where_a_rank_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows = tiny_model_folder(tmp_path, "llama", layers=LAYERS), prompts()[:2]
    loaded, teams = two_ranks(folder)
    golden = Golden(rows, MAX_TOKENS, page_size=4)
    golden.num_pages = 60
    record, killed = RankedGpuEngine.record, list[int]()

    def kill_once(engine: RankedGpuEngine, *given: Any) -> None:
        if not killed:
            killed.append(engine.pids[0])
            os.kill(engine.pids[0], signal.SIGKILL)
        record(engine, *given)

    monkeypatch.setattr(RankedGpuEngine, "record", kill_once)
    monkeypatch.setattr(recorder, "GraphRecorder", new_recorder)
    with caplog.at_level(logging.WARNING, "llmbatch"):
        engine = recording_factory(folder, teams, golden).engine(loaded, None, None)
    assert caplog.messages == ["rank 1 of 2 ended by signal 9 while steps were recorded: they are recorded again"]
    golden.run(engine, Blend(0.1, 0.2), 16)
    assert RECORDERS.pop().repeated > 0


def refuse(*_: Any) -> None:
    raise RuntimeError("it waits\nfor something")


def test_a_rank_that_does_not_come_up_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_RANK", "llmbatch.errors")  # which has no `main`
    folder = tiny_model_folder(tmp_path, "llama", layers=LAYERS)
    loaded, teams = two_ranks(folder)
    pages = {"num_pages": 2, "window_pages": 0, "page_size": 4}
    with pytest.raises(
        JobError, match=r"^the ranks of tensor_parallel=2 must all start, and rank 1 of 2 ended with status 1$"
    ):
        ranked_engine(loaded, TritonAttention(HOST), teams, pages, recorder=None)
    assert "cannot import name 'main'" in capfd.readouterr().err


def test_ranks_meet_at_the_loopback_alone() -> None:
    meeting = Meeting()
    listening = {
        address
        for table in Path("/proc/net").glob("tcp*")
        for line in table.read_text().splitlines()[1:]
        for address, _, port in [line.split()[1].partition(":")]
        if int(port, 16) == meeting.port and line.split()[3] == "0A"
    }
    assert listening == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}


def test_a_collective_does_not_wait_for_the_end_of_an_abort() -> None:
    """NCCL aborts kernels at once, and waits then for the end of graphs, which the engine holds that is told so."""
    meeting, aborts, graphs_end = Meeting(), threading.Event(), threading.Event()
    aborted: list[bool] = []

    class Group:
        def abort(self) -> None:
            aborts.set()
            aborted.append(graphs_end.wait(5.0))

    meeting._group = Group()
    leaving = threading.Thread(target=meeting.leave)
    leaving.start()
    aborts.wait()
    with pytest.raises(RankLost, match=r"^a rank has ended$"):
        meeting.begin(lambda _: None)
    assert aborted == []
    graphs_end.set()
    leaving.join()


def test_a_group_that_does_not_open_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a host's links or its /dev/shm is in NCCL's words alone."""

    def refuse(*_: Any) -> None:
        raise torch.distributed.DistBackendError("NCCL error in: a file\nLast error:\nNo space left on device (28)")

    monkeypatch.setattr(meeting_module, "_open_group", refuse)
    with pytest.raises(RankLost, match=r"^a rank does not answer: NCCL .* error: No space left on device \(28\)$"):
        Meeting().join(0, 1, HOST)


def test_a_group_does_not_leave_its_environment_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "before")
    monkeypatch.delenv("B", raising=False)
    with meeting_module._environment({"A": "within", "B": "within"}):
        assert (os.environ["A"], os.environ["B"]) == ("within", "within")
    assert os.environ["A"] == "before"
    assert "B" not in os.environ


def test_a_share_can_be_measured_before_others_are_there() -> None:
    alone, states = DeviceCollectives(0, 3), torch.ones(2)
    assert alone.sum(states) is states
    assert len(alone.gather(states)) == 3


@pytest.mark.parametrize(
    ("first_gpu", "ranks", "said"),
    [
        (0, 8, "tensor_parallel must be at most 4, the GPUs that this process sees, got 8"),
        (3, 2, "tensor_parallel must be at most 1, the GPUs from number 3 on that this process sees, got 2"),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, first_gpu: int, ranks: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        first_of_gpus(replace(ALONE, device=torch.device("cuda", first_gpu)), ranks)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("overlap", "interleaved", "auto or sequential"),
        ("kv", "host", "device"),
        ("weights", "host", "auto or resident"),
        ("dtype", "fp8", "auto or float32 or bfloat16 or float16 or int8 or int4"),
    ],
)
def test_what_ranks_cannot_do_is_refused(name: str, value: str, rule: str) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ParameterError, match=f"^{name} must be {rule} where tensor_parallel is above 1, got '{value}'"):
        Options.build(model="m", prompt="text", max_tokens=1, tensor_parallel=2, **given)


def new_recorder() -> Again:
    RECORDERS.append(Again())
    return RECORDERS[-1]


def two_ranks(folder: str) -> tuple[LoadedModel, RankTeams]:
    """The share of the first of two ranks, and what starts the other one."""
    platform = first_of_gpus(ALONE, 2)
    orders = RankOrders(
        ranks=2,
        folder=folder,
        dtype="float32",
        kv_cache_dtype="auto",
        load_format="auto",
        trust_remote_code=False,
        context_length=512,
    )
    return load_model(folder, dtype="float32", platform=platform), teams_on_gpus(platform, orders)
