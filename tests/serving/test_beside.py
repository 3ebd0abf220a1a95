"""`run --beside` at `llmbatch serve`: jobs of other processes on the engine that guests have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from llmbatch.errors import InputError
from llmbatch.inference.progress import Advance, Silence
from tests.serving.test_serve import MODEL, serving

TEXTS = [f"{'abcd'[i % 4] * (1 + i % 5)} {i * 7 % 60}" for i in range(60)]
COLUMNS = ("generated_text", "num_input_tokens", "num_generated_tokens", "finish_reason", "error")


class Visiting(Silence):
    """Asks the endpoint something each time that answers of the job have come."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model
        self.heard: list[str] = []

    def advance(self, done: Advance) -> None:
        if done.rows and len(self.heard) < 3:
            messages = [{"role": "user", "content": "hello"}]
            found = self._client.chat.completions.create(
                model=self._model, messages=messages, max_tokens=5, temperature=0
            )
            self.heard.append(str(found.choices[0].message.content))


def table(folder: Path, name: str) -> pa.Table:
    return pq.read_table(folder / name).select(list(COLUMNS))


def test_a_job_beside_guests_has_the_answers_that_it_has_alone(
    chatting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "in.parquet")
    asked: dict[str, Any] = {"model": chatting, "prompt": "text", "chat": True, "max_tokens": 12, "window_rows": 20}
    with serving(model=chatting, state_dir=tmp_path / "state", **MODEL) as client:
        url, guests = str(client.base_url), Visiting(client, chatting)
        report = llmbatch.run(tmp_path / "in.parquet", tmp_path / "out", beside=url, progress=guests, **asked)
    assert (report.rows, report.errors) == (len(TEXTS), 0)
    assert len(set(guests.heard)) == 1
    llmbatch.run(tmp_path / "in.parquet", tmp_path / "here", **asked, **MODEL)
    assert table(tmp_path, "out").equals(table(tmp_path, "here"))


def test_a_job_needs_the_endpoint_s_key(chatting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": TEXTS[:2]}), tmp_path / "in.parquet")
    (tmp_path / "key").write_text("secret\n")
    asked: dict[str, Any] = {"model": chatting, "prompt": "text", "max_tokens": 3}
    with serving(model=chatting, state_dir=tmp_path / "state", api_key_file=tmp_path / "key", **MODEL) as client:
        asked["beside"] = str(client.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "another")
        with pytest.raises(InputError, match=r"refuses the key \(401\): set OPENAI_API_KEY"):
            llmbatch.run(tmp_path / "in.parquet", tmp_path / "out", **asked)
        report = llmbatch.run(tmp_path / "in.parquet", tmp_path / "out", api_key_file=tmp_path / "key", **asked)
    assert (report.rows, report.errors) == (2, 0)
