"""The files in examples/ run as they are, with a tiny random model."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmbatch
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT
from tests.support.s3 import S3Server
from tests.support.s3 import s3_fixture as s3_fixture

EXAMPLES = ROOT / "examples"
MOST_LINES = 80


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a tiny model with a chat template and a context of 4096 tokens."""
    folder = tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=CHAT_TEMPLATE)
    config = Path(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    return folder


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_documents_are_curated_on_ray(chat_model: str, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("llguidance")
    from tests.support.ray_jobs import start

    program = runpy.run_path(str(EXAMPLES / "ray_curation.py"))
    texts = [f"{word} of part {part}" for part in range(2) for word in ("birch", "lamp", "a", "zz", "fjord", "0")]
    (tmp_path / "documents").mkdir()
    for part in range(2):
        written(tmp_path / "documents" / f"{part}.parquet", "text", texts[6 * part : 6 * part + 6])
    start(num_cpus=2, include_dashboard=False)
    try:
        program["main"](chat_model, str(tmp_path / "documents"), str(tmp_path / "kept"))
    finally:
        ray.shutdown()
    judge: Any = llmbatch.LLMOperator(
        model=chat_model, template=program["ASK"], chat=True, structured_outputs={"choice": ["yes", "no"]}
    )
    answers = judge(pa.table({"text": texts}))["generated_text"].to_pylist()
    tables = map(pq.read_table, (tmp_path / "kept").glob("*.parquet"))
    kept = [text for table in tables for text in table["text"].to_pylist()]
    assert sorted(kept) == sorted(text for text, answer in zip(texts, answers) if answer == "yes")


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
