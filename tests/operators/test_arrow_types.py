"""Columns of every type, through the libraries that people hold tables in: as they went in, or a sentence."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from llmbatch import LLMOperator
from llmbatch.errors import DataError

DAY, MOMENT = dt.date(2026, 11, 24), dt.datetime(2026, 11, 24, 7, 30, 0, 123456)
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, None]),
    "int8": (pa.int8(), [-128, None]),
    "int16": (pa.int16(), [-1, 2]),
    "int32": (pa.int32(), [1, None]),
    "int64": (pa.int64(), [1 << 60, None]),
    "uint8": (pa.uint8(), [255, 0]),
    "uint16": (pa.uint16(), [65535, None]),
    "uint32": (pa.uint32(), [1, 2]),
    "uint64": (pa.uint64(), [(1 << 64) - 1, None]),
    "float16": (pa.float16(), [1.5, 2.0]),
    "float32": (pa.float32(), [0.1, None]),
    "float64": (pa.float64(), [float("inf"), None]),
    "decimal128": (pa.decimal128(20, 3), [Decimal("12.345"), None]),
    "decimal256": (pa.decimal256(50, 3), [Decimal("12.345"), None]),
    "string": (pa.string(), ["é", None]),
    "large_string": (pa.large_string(), ["", "a"]),
    "string_view": (pa.string_view(), ["a longer string than is held inline", None]),
    "binary": (pa.binary(), [b"\xff\x00", None]),
    "large_binary": (pa.large_binary(), [b"", b"a"]),
    "date32": (pa.date32(), [DAY, None]),
    "time64": (pa.time64("us"), [MOMENT.time(), None]),
    "timestamp": (pa.timestamp("us"), [MOMENT, None]),
    "timestamp_tz": (pa.timestamp("ns", "Europe/Berlin"), [MOMENT.replace(tzinfo=dt.UTC), None]),
    "duration": (pa.duration("ms"), [dt.timedelta(days=1), None]),
    "list": (pa.list_(pa.int32()), [[1, None], []]),
    "fixed_size_list": (pa.list_(pa.float32(), 2), [[1.0, 2.0], [3.0, 4.0]]),
    "struct": (pa.struct({"a": pa.int64(), "b": pa.string()}), [{"a": 1, "b": None}, None]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["x", "y"]),
}


@pytest.fixture(scope="module")
def operator(model: str) -> Any:
    return LLMOperator(model=model, prompt="text", engine="simulated", max_tokens=2)


def table_of(name: str) -> pa.Table:
    kind, values = TYPES[name]
    return pa.table({"text": ["a", "b"], "x": pa.array(values, kind)})


@pytest.mark.parametrize("name", TYPES)
def test_arrow_gives_each_type_back(operator: Any, name: str) -> None:
    table = table_of(name)
    assert operator(table).select(["text", "x"]).equals(table)
    assert operator.stream(table).read_all().select(["text", "x"]).equals(table)


@pytest.mark.parametrize("name", TYPES)
def test_polars_gives_each_type_back(operator: Any, name: str) -> None:
    if name == "decimal256":
        pytest.skip("Polars does not hold it")
    frame: Any = pl.from_arrow(table_of(name))
    assert operator(frame).select("text", "x").equals(frame)
    assert operator(frame.lazy()).collect().select("text", "x").equals(frame)
    assert operator(frame).schema["x"] == operator(frame.lazy()).collect_schema()["x"] == frame.schema["x"]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("arrow_backed", [False, True])
def test_pandas_gives_each_type_back(operator: Any, name: str, arrow_backed: bool) -> None:
    if name == "string_view" and arrow_backed:
        pytest.skip("pandas does not hold it")
    frame = table_of(name).to_pandas(types_mapper=pd.ArrowDtype if arrow_backed else None)
    pd.testing.assert_frame_equal(operator(frame)[["text", "x"]], frame)


@pytest.mark.parametrize("name", TYPES)
def test_duckdb_gives_each_type_back(operator: Any, name: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    if name in ("float16", "decimal256"):
        pytest.skip("DuckDB does not read it")
    connection = duckdb.connect()
    table = table_of(name)
    relation = connection.from_arrow(table)
    answered = operator(relation)
    assert answered.types[:2] == relation.types
    assert answered.project("text, x").to_arrow_table() == relation.to_arrow_table()
    assert operator.stream(relation).read_all()["x"].to_pylist() == relation.to_arrow_table()["x"].to_pylist()


@pytest.mark.parametrize("name", TYPES)
def test_datasets_give_each_type_back(operator: Any, name: str) -> None:
    datasets = pytest.importorskip("datasets")
    try:
        asked = datasets.Dataset(table_of(name))
    except (ValueError, TypeError, NotImplementedError):
        pytest.skip("datasets does not hold it")
    answered = operator(asked)
    assert isinstance(answered, datasets.Dataset)
    assert answered.features["x"] == asked.features["x"]
    assert answered.select_columns(["text", "x"]).to_list() == asked.to_list()
    mapped = asked.map(operator, batched=True, batch_size=1)
    assert mapped.select_columns(["text", "x"]).to_list() == asked.to_list()


def test_types_that_arrow_does_not_keep_of_duckdb_are_refused_in_a_sentence(operator: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.connect().sql("select 'a' as text, '101'::bit as x")
    with pytest.raises(DataError, match=r"^a relation's columns must be of types that Arrow keeps, got 'x' of BIT: "):
        operator(relation)
