"""A job that is asked to end while its store is away ends soon, says what is missing, and goes on later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.errors import JobStopped
from llmbatch.inference.progress import Advance, Silence
from llmbatch.runtime.cancellation import StopRequest
from tests.support.models import tiny_model_folder
from tests.support.s3 import S3Server, s3_fixture  # noqa: F401

ROWS = 200


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_job_is_asked_to_end_while_its_store_is_away(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    monkeypatch.setattr("llmbatch.jobs.job._LAST", 0.5)
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(ROWS)]}), tmp_path / "in.parquet")
    out = f"{s3.bucket(f'away-{interrupted}'.lower())}/out.parquet"
    options: dict[str, Any] = {
        "model": tiny_model_folder(tmp_path / "model", "llama"),
        "prompt": "text",
        "max_tokens": 4,
        "max_running": 8,
        "storage_options": s3.storage_options,
    }
    stopping = StopRequest()

    class Leaves(Silence):
        def advance(self, done: Advance) -> None:
            if stopping.deadline is None:
                s3.stop()
                stopping.end_now()
                if interrupted:
                    raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt if interrupted else JobStopped) as ended:
            llmbatch.run(tmp_path / "in.parquet", out, progress=Leaves(), stopping=stopping, **options)
    finally:
        s3.start()
    if not interrupted:
        assert str(ended.value).startswith(
            f"the job was asked to end, and its last answers could not be written ({out}"
        )
        assert str(ended.value).endswith("): the same command goes on with those before")
    report = llmbatch.run(tmp_path / "in.parquet", out, **options)
    assert (report.rows, report.errors) == (ROWS, 0)
