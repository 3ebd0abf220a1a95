"""`df.llm.generate` on frames of Polars and pandas, and what of a lazy query goes below the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

import llmbatch
from llmbatch.inference.worker import Worker

ROWS = 2000


@pytest.fixture(scope="module")
def operator(model: str) -> Any:
    return llmbatch.LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=8)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each window that is made."""
    rows: list[int] = []
    make = Worker.window

    def window(self: Worker, table: Any, **given: Any) -> Any:
        rows.append(table.num_rows)
        return make(self, table, **given)

    monkeypatch.setattr(Worker, "window", window)
    return rows


def frame() -> Any:
    """A lazy frame; `Any`, since type checkers do not know of its namespace."""
    return pl.LazyFrame({"id": range(ROWS), "text": [f"row {i}" for i in range(ROWS)], "unread": [b"x"] * ROWS})


def test_a_filter_on_the_input_goes_below_the_model(operator: Any, computed: list[int]) -> None:
    found = frame().llm.generate(operator).filter(pl.col("id") % 20 == 0).collect()
    assert found["id"].to_list() == list(range(0, ROWS, 20))
    assert found["generated_text"].null_count() == 0
    assert sum(computed) == ROWS // 20


def test_a_filter_on_answers_stays_above_the_model(operator: Any, computed: list[int]) -> None:
    query = frame().llm.generate(operator).filter((pl.col("id") < 100) & (pl.col("num_generated_tokens") > 1000))
    assert query.collect().height == 0
    assert sum(computed) == 100


def test_the_first_rows_are_all_that_is_computed(operator: Any, computed: list[int]) -> None:
    assert frame().llm.generate(operator).head(10).collect()["id"].to_list() == list(range(10))
    assert sum(computed) == 10


def test_where_no_answer_is_read_nothing_is_computed(operator: Any, computed: list[int]) -> None:
    assert frame().llm.generate(operator).select("id").collect().height == ROWS
    assert computed == []


def test_a_query_is_lazy_and_says_what_it_does(operator: Any, computed: list[int]) -> None:
    query = frame().llm.generate(operator)
    assert query.collect_schema()["generated_text"] == pl.String
    assert "llm.generate" in query.explain()
    assert computed == []


def test_answers_stream_to_a_file(operator: Any, tmp_path: Path) -> None:
    frame().llm.generate(operator).sink_parquet(tmp_path / "answers.parquet")
    assert pl.read_parquet(tmp_path / "answers.parquet", columns=["id"])["id"].to_list() == list(range(ROWS))


def test_an_eager_frame_stays_one(operator: Any) -> None:
    eager: Any = frame().head(5).collect()
    answered = eager.llm.generate(operator)
    assert isinstance(answered, pl.DataFrame)
    assert answered.columns[:4] == ["id", "text", "unread", "generated_text"]


def test_a_frame_of_pandas_keeps_its_index(operator: Any) -> None:
    asked: Any = pd.DataFrame({"text": ["a", "b"]}, index=["x", "y"])
    answered = asked.llm.generate(operator)
    assert answered.index.tolist() == ["x", "y"]
    assert answered["generated_text"].notna().all()


def test_windows_of_no_rows_are_refused_before_anything_is_read(operator: Any) -> None:
    with pytest.raises(llmbatch.ParameterError, match=r"^window_rows must be at least 1, got 0$"):
        frame().llm.generate(operator, window_rows=0)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(llmbatch.ParameterError, match=r"^generate takes LLMOperator\(\.\.\.\), got 'model'$"):
        frame().llm.generate("model")
