"""The first rows of a job split the memory of its pool, before there is an engine that has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from llmbatch.engine.model.config import describe_model
from llmbatch.inference.options import Options
from llmbatch.inference.worker import Worker
from llmbatch.jobs.forecast import forecast
from tests.support.models import tiny_model_folder


def worker(folder: str, tokens: int) -> Worker:
    """A model with so many tokens of KV, if pages held all layers."""
    memory = tokens * describe_model(folder, dtype="float32").bytes_per_token
    return Worker.open(
        Options.build(
            model=folder, prompt="text", chat=False, max_tokens=4, dtype="float32", device="cpu", kv_memory=memory
        )
    )


def texts(length: int, seed: int) -> pa.Table:
    """Sixty rows of so many letters, a token each."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, (60, length)).astype(np.uint8)
    return pa.table({"text": [row.tobytes().decode() for row in letters]})


def test_the_first_rows_split_the_pool_as_is_forecast_and_answers_stay_the_same(tmp_path: Path) -> None:
    folder, rows = tiny_model_folder(tmp_path, "gemma3"), texts(100, 0)
    small = worker(folder, 2000)
    before = small.pool
    foretold = forecast(small.options, small.shard(rows), small.pool, small.cost, small.scheduling)
    answered = small.answer(rows).table
    split = small.pool
    assert split.num_pages < before.num_pages
    assert split.windows.num_pages > 2 * before.windows.num_pages
    assert foretold.kv_tokens == split.tokens
    assert answered["error"].null_count == 60
    assert answered["generated_text"].equals(worker(folder, 100_000).answer(rows).table["generated_text"])
    small.answer(texts(20, 1))
    assert small.pool == split
