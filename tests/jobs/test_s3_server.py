"""A job on a real S3 server, which goes away and comes back while it runs.

Runs where $LLMBATCH_S3_SERVER names a script that knows `start` (which prints the variables to export), `stop`,
`gateway-stop` and `gateway-start`.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.inference.progress import Advance
from tests.support.models import tiny_model_folder

SERVER = os.environ.get("LLMBATCH_S3_SERVER")
ROWS = 30_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVER is None, reason="$LLMBATCH_S3_SERVER names no script that runs an S3 server"),
]


def server(command: str) -> str:
    assert SERVER is not None
    return subprocess.run([SERVER, command], check=True, stdout=subprocess.PIPE, text=True).stdout


def started() -> str:
    """What the server says when it runs: on a busy machine it may give up before it does."""
    for _ in range(2):
        try:
            return server("start")
        except subprocess.CalledProcessError:
            server("stop")
    return server("start")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of a new bucket; the server's address and keys are in the environment."""
    import s3fs

    before = dict(os.environ)
    os.environ.update(re.findall(r"(\w+)=(\S+)", started()))
    try:
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("llmbatch-tests")
        yield "s3://llmbatch-tests"
    finally:
        server("stop")
        os.environ.clear()
        os.environ.update(before)


class Outage:
    """Takes the server away for 20 seconds when a third of the rows are answered."""

    def __init__(self) -> None:
        self.back: threading.Timer | None = None

    def start(self, rows: int) -> None:
        pass

    def advance(self, done: Advance) -> None:
        if self.back is None and done.rows >= ROWS // 3:
            server("gateway-stop")
            self.back = threading.Timer(20.0, server, ["gateway-start"])
            self.back.start()

    def say(self, sentence: str) -> None:
        pass


def test_a_job_outlives_a_store_that_is_away_for_twenty_seconds(
    bucket: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import s3fs

    store = s3fs.S3FileSystem(use_listings_cache=False)
    model = tiny_model_folder(tmp_path_factory.mktemp("model"), "llama")
    table = pa.table({"text": [f"row {i}" for i in range(ROWS)], "n": [i % 40 + 1 for i in range(ROWS)]})
    with store.open("llmbatch-tests/in/rows.parquet", "wb") as file:
        pq.write_table(table, file)
    outage = Outage()
    options: dict[str, Any] = {"model": model, "prompt": "text", "engine": "simulated", "output_tokens": "n"}
    report = llmbatch.run(f"{bucket}/in", f"{bucket}/out", max_tokens=64, window_rows=4000, progress=outage, **options)
    assert outage.back is not None
    outage.back.join()
    assert (report.rows, report.errors) == (ROWS, 0)
    found = pq.read_table("llmbatch-tests/out", filesystem=store)
    assert found.select(["text", "n"]).equals(table)
    assert found["num_generated_tokens"].to_pylist() == table["n"].to_pylist()
