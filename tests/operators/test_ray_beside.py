"""`LLMOperator(beside=...)` in an actor of real Ray, at an endpoint that `llmbatch serve` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from llmbatch import LLMOperator  # noqa: E402
from tests.serving.test_serve import MODEL, serving  # noqa: E402
from tests.support.ray_jobs import answered, rows_of  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("ray_of_two_cpus"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, about its settings
]


def test_rows_are_answered_by_an_endpoint_and_its_actor_needs_no_core_and_no_torch(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    table = rows_of(40)
    asked: dict[str, Any] = {"model": model, "prompt": "text", "max_tokens": 12, "ignore_eos": True}
    with serving(model=model, state_dir=tmp_path / "state", **MODEL) as client:
        beside: Any = LLMOperator(**asked, beside=str(client.base_url))

        class Witness(beside):  # type: ignore[misc]
            """Says with each row what its actor has reserved, and how many rows it was called with."""

            def __call__(self, batch: pa.Table) -> pa.Table:
                found = super().__call__(batch)
                reserved = ray.get_runtime_context().get_assigned_resources()
                told = {"reserved": str(reserved), "rows": batch.num_rows, "torch": "torch" in sys.modules}
                for name, value in told.items():
                    found = found.append_column(name, pa.array([value] * found.num_rows))
                return found

        ds = ray.data.from_arrow(table).repartition(2)
        found = answered(ds.map_batches(Witness, concurrency=1, num_cpus=0, batch_size=20, batch_format="pyarrow"))
    told = ["id", "text", "generated_text", "num_input_tokens", "num_generated_tokens", "finish_reason", "error"]
    expected = cast(Any, LLMOperator(**asked, **MODEL))(table)
    assert found.select(told).equals(expected.select(told))
    assert set(found["rows"].to_pylist()) == {20}
    assert set(found["reserved"].to_pylist()) == {"{}"}
    assert set(found["torch"].to_pylist()) == {False}
