"""Tables of every library through the operator: nothing of theirs is lost, and the answers are beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from llmbatch import DataError, LLMOperator
from llmbatch.inference.answers.schema import AnswerSchema

TABLE = pa.table({"id": [3, 1, 2], "text": ["abc", "abd", "x"]})
TEXTS = ["2 simulated tokens"] * 3


@pytest.fixture(scope="module")
def operator(model: str) -> Any:
    return LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=2)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_record_batch_stays_one_whatever_its_rows(operator: Any, rows: int, chunks: int) -> None:
    batch = (
        TABLE.slice(0, rows).combine_chunks().to_batches()[0] if rows else pa.RecordBatch.from_pylist([], TABLE.schema)
    )
    answered = operator(batch)
    assert isinstance(answered, pa.RecordBatch)
    assert answered.schema.names == ["id", "text", *AnswerSchema().columns.names]
    assert answered["generated_text"].to_pylist() == TEXTS[:rows]


def test_a_reader_stays_a_reader(operator: Any) -> None:
    answered = operator(pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches(max_chunksize=2)))
    assert isinstance(answered, pa.RecordBatchReader)
    assert answered.read_all()["generated_text"].to_pylist() == TEXTS


def test_a_data_frame_keeps_names_index_and_types(model: str) -> None:
    operator: Any = LLMOperator(model=model, prompt="0", engine="simulated", max_tokens=2)
    frame = pd.DataFrame({0: ["a", "b"], 1: pd.Categorical(["x", "y"]), "2": [1, None]}, index=[7, 7])
    answered = operator(frame)
    assert answered.columns.tolist() == [0, 1, "2", *AnswerSchema().columns.names]
    assert answered["generated_text"].tolist() == TEXTS[:2]
    pd.testing.assert_frame_equal(answered[[0, 1, "2"]], frame)
    assert operator(frame.iloc[:0]).columns.tolist() == [0, 1, "2", *AnswerSchema().columns.names]


def test_a_data_frame_whose_prompts_are_nested_columns_of_arrow_is_answered(model: str) -> None:
    operator: Any = LLMOperator(model=model, prompt="ids", engine="simulated", max_tokens=2)
    ids = pd.Series([[1], [2, 3]], index=[7, 7], dtype=pd.ArrowDtype(pa.list_(pa.int32())))
    frame = pd.DataFrame({"ids": ids, "x": pd.Categorical(["x", "y"])})
    answered = operator(frame)
    assert answered["generated_text"].tolist() == TEXTS[:2]
    pd.testing.assert_frame_equal(answered[["ids", "x"]], frame)


def test_a_polars_frame_keeps_its_types_and_a_lazy_one_stays_lazy(operator: Any) -> None:
    frame = pl.DataFrame({"text": ["a", "b"], "e": pl.Series(["u", "v"], dtype=pl.Enum(["v", "u"]))})
    answered = operator(frame)
    assert answered.select("text", "e").equals(frame)
    assert answered.schema["e"] == pl.Enum(["v", "u"])
    lazy = operator(frame.lazy().filter(pl.col("e") == "u"))
    assert isinstance(lazy, pl.LazyFrame)
    assert lazy.collect()["generated_text"].to_list() == TEXTS[:1]


@pytest.mark.parametrize("kind", [pl.DataFrame, pl.LazyFrame])
def test_a_type_of_polars_that_arrow_does_not_have_is_refused_where_it_is_read(operator: Any, kind: Any) -> None:
    wide = pl.Series([1], dtype=pl.Int128)
    assert operator(kind({"text": ["a"], "wide": wide})).lazy().collect()["generated_text"].to_list() == TEXTS[:1]
    with pytest.raises(DataError, match=f"a {kind.__name__} must be a table that Arrow can hold: Invalid"):
        operator(kind({"text": wide}))


@pytest.mark.parametrize("kind", [pl.DataFrame, pl.LazyFrame])
def test_objects_in_a_frame_of_polars_stay_and_are_not_streamed(operator: Any, kind: Any) -> None:
    held = object()
    frame = kind({"text": ["a"], "held": pl.Series([held], dtype=pl.Object)})
    assert operator(frame).lazy().collect()["held"].to_list() == [held]
    with pytest.raises(DataError, match="a column must hold what Arrow can, but 'held' holds Python objects"):
        operator.stream(frame)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4), (3, 0), (3, 0, 2)])
def test_arrays_of_any_shape_come_back_as_they_are(operator: Any, shape: tuple[int, ...]) -> None:
    batch = {
        "text": np.array(["abc", "abd", "x"], object),
        "x": np.arange(np.prod(shape)).reshape(shape),
        "y": [1, 2, 3],
    }
    answered = operator(batch)
    assert list(answered) == ["text", "x", "y", *AnswerSchema().columns.names]
    assert answered["x"] is batch["x"]
    assert answered["y"].tolist() == [1, 2, 3]
    assert answered["generated_text"].tolist() == TEXTS


def test_whatever_streams_arrow_is_answered_as_a_table(operator: Any) -> None:
    class Relation:  # as DuckDB's
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return TABLE.__arrow_c_stream__(requested_schema)

    answered = operator(Relation())
    assert isinstance(answered, pa.Table)
    assert answered.select(["id", "text"]).equals(TABLE)
    assert answered["generated_text"].to_pylist() == TEXTS


def test_a_relation_of_duckdb_is_answered(operator: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql("select * from (values (1, 'abc'), (2, 'abd')) as t(id, text)")
    answered = operator(relation)
    assert isinstance(answered, duckdb.DuckDBPyRelation)
    assert answered.columns == ["id", "text", *AnswerSchema().columns.names]
    assert answered.project("id, generated_text").fetchall() == [(1, TEXTS[0]), (2, TEXTS[1])]


def test_columns_of_a_join_that_duckdb_takes_for_one_keep_their_values(operator: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql(
        "select * from (values (1, 'abc', 5, 8), (2, 'abd', 6, 9)) as a(id, text, Of, id_1) "
        "left join (values (1, 'x', 7::hugeint)) as b(id, of, Error) on a.id = b.id order by a.id"
    )
    answered = operator(relation)
    names = AnswerSchema().columns.names
    names[names.index("error")] = "error_1"  # as DuckDB has it beside a column Error
    assert answered.columns == [*relation.columns, *names]
    assert answered.types[: len(relation.types)] == relation.types
    assert [row[:8] for row in answered.fetchall()] == [(*row, text) for row, text in zip(relation.fetchall(), TEXTS)]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            [1, 2],
            "LLMOperator takes a pyarrow Table, RecordBatch, RecordBatchReader or Dataset, a pandas DataFrame, "
            "a Polars DataFrame or LazyFrame, a DuckDB relation, a Dataset of datasets, a dict of arrays, or what has "
            "__arrow_c_stream__ or __arrow_c_array__, got list",
        ),
        ({"text": ["a"], "n": [1, 2]},
         "a dict must be a table that Arrow can hold: Column 1 named n expected length 1 but got length 2"),
        ({"text": "abc"},
         "a dict must be a table that Arrow can hold: a column must be a list or an array, got 'abc'"),
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), "a DataFrame must be a table that Arrow can hold: "
         "Duplicate column names found: ['text', 'text']"),
    ],
)  # fmt: skip  # arguments in groups
def test_what_is_no_table_is_refused(operator: Any, batch: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        operator(batch)
    assert str(caught.value) == said


@pytest.mark.parametrize("frame", [pa.table({}), pd.DataFrame(), pl.DataFrame(), pl.LazyFrame(), {}], ids=type)
def test_a_frame_of_no_columns_is_refused(operator: Any, frame: Any) -> None:
    with pytest.raises(DataError, match=r"^the prompt column 'text' is not in the input, which has no columns$"):
        operator(frame)


def test_values_without_columns_are_refused(operator: Any) -> None:
    with pytest.raises(DataError, match=r"^a Series must be a table that Arrow can hold: "):
        operator(pl.Series("text", ["a"]))


def test_rows_of_a_dataset_are_answered_together_or_not_at_all(operator: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["abc", "abd"]})
    assert list(rows.map(operator, batched=True)["generated_text"]) == TEXTS[:2]
    message = r"^a table must have rows, got one row of a Dataset: map it with batched=True$"
    with pytest.raises(DataError, match=message):
        rows.map(operator)


def test_a_dataset_without_rows_has_the_columns_of_answers(operator: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["abc", "abd"]})
    assert operator(rows.select([])).features == operator(rows).features


def test_what_of_datasets_is_no_table_is_refused_with_the_way_that_works(operator: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["abc", "abd"]})
    stream = rows.to_iterable_dataset()
    with pytest.raises(
        DataError, match=r"^a table must be there as a whole, got IterableDataset: ds\.map\(op, batched=T"
    ):
        operator(stream)
    assert [row["generated_text"] for row in stream.map(operator, batched=True)] == TEXTS[:2]
    with pytest.raises(
        DataError, match=r"^a table must be one split, got DatasetDict: take it by its name, as in ds\['a"
    ):
        operator(datasets.DatasetDict({"all": rows}))
