"""What requests cost is foreseen with what comes of the weights at each step, from wherever they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import llmbatch
from llmbatch.engine.calibration import device_cost
from llmbatch.engine.calibration.device_cost import cost_model, foresee
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.weights.host_layers import PlainCopies
from llmbatch.inference.options import Options

RATE = 1e6


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cost, "disk_rate", lambda folder, size: RATE)
    monkeypatch.setattr(device_cost, "link_rate", lambda copies, device: RATE)


@pytest.mark.parametrize("source", ["disk", "link"])
def test_each_step_takes_the_seconds_of_what_comes(model: str, source: str) -> None:
    device: Platform = replace(HOST, is_host=source == "disk", copies=lambda _: PlainCopies())
    described = describe_model(model, dtype="float32", device=torch.device("cpu"))
    options = Options.build(model=model, prompt="text", max_tokens=1, kv_memory=2**24)
    whole = cost_model(device, described, options)
    least = foresee(device, described, options, kv_tokens=1000, weights=1)
    assert foresee(device, described, options, kv_tokens=1000, weights=None) == (whole, ())
    assert foresee(device, described, options, kv_tokens=1000, weights=10**9) == (whole, ())
    seconds = least.cost.rates.weight_seconds - whole.rates.weight_seconds
    assert 0.5 * whole.shape.weight_bytes / RATE < seconds < whole.shape.weight_bytes / RATE
    where = {"disk": "the disk", "link": "the host's memory"}[source]
    assert f"come from {where} at each step, at 0.00 GB/s" in least.notes[0]


def test_a_forecast_tells_of_it(model: str, tmp_path: Path) -> None:
    file = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"text": ["a b c"] * 20}), file)
    given: dict[str, Any] = {"model": model, "prompt": "text", "max_tokens": 4, "dtype": "float32", "kv_memory": 2**24}
    resident = llmbatch.explain(file, **given)
    streamed = llmbatch.explain(file, **given, weights="disk", weights_memory=250_000)
    assert resident.notes == ()
    assert streamed.notes[0].startswith("weights do not all fit in the memory for them: ")
    assert streamed.seconds is not None
    assert resident.seconds is not None
    assert streamed.seconds > resident.seconds
