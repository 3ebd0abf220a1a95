"""`run(plan="auto")`: the GPUs that are here are searched, and the job runs on the best split of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.engine import devices
from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options
from llmbatch.io.reading.dataset import Dataset
from llmbatch.jobs.device_plan import on_planned_devices
from tests.support.jobs import Job

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def large(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model with Llama-3-70B's shape and no weights, of which 141 GB would be on GPUs."""
    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    more = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps({**config, **shape, **more}))
    return str(folder)


def options_of(model: str, **given: Any) -> Options:
    return Options.build(model=model, prompt="text", max_tokens=8, **given)


def source_of(folder: Path, rows: int = 20) -> Dataset:
    texts = pa.array([f"question {row}" for row in range(rows)], pa.string())
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    return Dataset.resolve([str(folder / "in.parquet")], None)


def see(patch: pytest.MonkeyPatch, *names: str) -> None:
    patch.setattr(devices, "gpus_alike", lambda device: list(names))


def test_without_a_gpu_one_process_runs_and_says_so(model: str, tmp_path: Path) -> None:
    job = Job(model, tmp_path, options={"prompt": "text", "max_tokens": 4, "kv_memory": 2**22})
    job.write(pa.table({"text": ["a", "b"]}))
    report = job.run(plan="auto")
    assert report.errors == 0
    assert "the plan is one process on the processor, since there is no GPU to plan for" in report.notes


def test_gpus_share_a_model_that_none_has_room_for(large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *[H100] * 4)
    found = on_planned_devices(options_of(large), source_of(tmp_path))
    assert found.tensor_parallel == 4
    assert found.notes[-1].startswith("the plan is 4 h100: ")


def test_a_small_model_stays_on_one_gpu(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, *[H100] * 2)
    found = on_planned_devices(options_of(model), source_of(tmp_path))
    assert found.tensor_parallel == 1
    assert found.notes[-1].startswith("the plan is 1 h100: ")


def test_of_many_rows_a_sample_is_read(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, H100)
    found = on_planned_devices(options_of(model), source_of(tmp_path, 5_000))
    assert found.notes[-1].startswith("the plan is 1 h100: ")


def test_a_job_without_rows_has_no_plan(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, H100)
    found = on_planned_devices(options_of(model), source_of(tmp_path, 0))
    assert found.tensor_parallel == 1
    assert found.notes[-1] == "there is nothing to plan for, since no row that was read can be answered"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel must be left out where plan is auto, which decides it, got 2"),
        ({"weights": "host"}, "weights must be left out where plan is auto, which decides it, got 'host'"),
        ({"kv": "host"}, "kv must be left out where plan is auto, which decides it, got 'host'"),
        (
            {"engine": "simulated"},
            "plan must be 'given' for engine='simulated', which has no devices, got 'auto': leave plan out",
        ),
        (
            {"beside": "http://localhost:1"},
            "plan must be 'given' where endpoints answer, which have devices of their own, got 'auto': leave plan out",
        ),
    ],
)
def test_what_a_plan_decides_is_left_out(model: str, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as raised:
        on_planned_devices(options_of(model, **given), source_of(tmp_path))
    assert str(raised.value) == said


def test_a_plan_is_given_or_auto(job: Job) -> None:
    with pytest.raises(ParameterError) as raised:
        job.run(plan="best")
    assert str(raised.value) == "plan must be one of given, auto, got 'best'"
