"""The files in examples/ run as they are, with a tiny random model; that on Ray does in `tests.operators.test_ray`."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.models import chat_model_folder
from tests.support.paths import ROOT
from tests.support.s3 import S3Server
from tests.support.s3 import s3_fixture as s3_fixture

EXAMPLES = ROOT / "examples"
MOST_LINES = 80


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny model with a chat template and a context of 4096 tokens."""
    return chat_model_folder(tmp_path_factory.mktemp("model"))


def example(name: str) -> Callable[..., None]:
    """What a file does when it is called as a program."""
    main: Callable[..., None] = runpy.run_path(str(EXAMPLES / name))["main"]
    return main


def written(path: Path, column: str, texts: list[str], **others: list[str]) -> str:
    """A Parquet file of texts."""
    pq.write_table(pa.table({column: texts, **others}), path)
    return str(path)


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]), ids=lambda path: path.name
)
def test_an_example_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert len(text.splitlines()) < MOST_LINES


def test_an_arrow_table_is_answered(chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("operator_arrow.py")(chat_model)
    assert capsys.readouterr().out.startswith("France: ")


def test_a_lazy_query_filters_before_and_after_the_model(chat_model: str, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    reviews = [f"{'long and winding ' * 6}{number}" for number in range(24)] + ["short"] * 4
    source = written(tmp_path / "reviews.parquet", "review", reviews, product=["lamp"] * 28)
    example("polars_pipeline.py")(chat_model, source, str(tmp_path / "out.parquet"))
    table = polars.read_parquet(tmp_path / "out.parquet")
    assert table.columns == ["product", "summary"]
    assert table.height <= 24


def test_texts_become_columns(chat_model: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    source = written(tmp_path / "mails.parquet", "mail", [f"my lamp {number} is broken" for number in range(3)])
    example("extract_json.py")(chat_model, source, str(tmp_path / "out.parquet"))
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert rows
    for row in rows:
        assert row["kind"] in ("complaint", "question", "praise")
        assert 1 <= row["urgency"] <= 5


def test_an_evaluation_set_is_written_and_scored(chat_model: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    source = written(tmp_path / "passages.parquet", "passage", ["lamp 1 is green", "lamp 2 is red"])
    example("evaluation_set.py")(chat_model, source, str(tmp_path / "set.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        assert len(row["choices"]) == len(row["log_likelihoods"]) == 4
        assert max(row["log_likelihoods"]) < 0


def test_the_notebook_reads_and_writes_s3(s3: S3Server, chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    for name, value in {**s3.environment, "MODEL": chat_model, "BUCKET": s3.bucket("notebook")}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "s3.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = notebook.cells[-1].outputs[0].data["text/plain"]
    assert "generated_text" in shown
    assert shown.count("What is the capital of") == 4
