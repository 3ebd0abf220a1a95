"""Parquet files: one schema of all, rows read a piece at a time."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError
from llmbatch.io.reading.dataset import Dataset
from tests.support.datasets import parquet, refusal


def test_rows_of_all_files_are_read_in_order_and_columns_found_by_name(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=[1, 2], b=["x", None])
    second = parquet(tmp_path / "2.parquet", b=["y"], a=[3])
    inputs = Dataset.resolve([first, second])
    assert inputs.schema == pa.schema({"a": pa.int64(), "b": pa.string()})
    assert inputs.num_rows == 3
    assert inputs.read().to_pydict() == {"a": [1, 2, 3], "b": ["x", None, "y"]}
    assert inputs.read().schema == inputs.schema


def test_a_column_of_nothing_but_nulls_takes_the_type_it_has_elsewhere(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=pa.nulls(1))
    second = parquet(tmp_path / "2.parquet", a=["x"])
    assert Dataset.resolve([first, second]).read().to_pydict() == {"a": [None, "x"]}
    assert Dataset.resolve([second, first]).schema == pa.schema({"a": pa.string()})


def test_a_file_without_rows_is_an_input(tmp_path: Path) -> None:
    inputs = Dataset.resolve([parquet(tmp_path / "1.parquet", a=pa.array([], pa.string()))])
    assert (inputs.num_rows, inputs.read().num_rows, inputs.nbytes) == (0, 0, 0)


def test_names_with_dots_are_names(tmp_path: Path) -> None:
    table = {"a": [1], "a.b": [2], "b": [{"c": 3}]}
    inputs = Dataset.resolve([parquet(tmp_path / "1.parquet", **table)])
    assert inputs.read().to_pydict() == table
    assert inputs.reader(["a"]).read(0, 1).to_pydict() == {"a": [1]}
    assert inputs.reader(["b", "a.b"]).read(0, 1).to_pydict() == {"b": [{"c": 3}], "a.b": [2]}


def test_dictionaries_stay_dictionaries(tmp_path: Path) -> None:
    column = pa.array(["x", None, "y"]).dictionary_encode()
    paths = [parquet(tmp_path / f"{number}.parquet", a=column[number:]) for number in range(2)]
    table = Dataset.resolve(paths).read()
    assert table.schema.field("a").type == column.type
    assert table["a"].to_pylist() == ["x", None, "y", None, "y"]


@pytest.mark.parametrize("keep", [0, 3, -9])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, a=list(range(100)))
    path.write_bytes(path.read_bytes()[:keep])
    text = refusal(str(path))
    assert text.startswith(f"{path} cannot be read as Parquet (")
    assert text.endswith("): write it again or leave it out")
    assert "\n" not in text


def test_a_damaged_page_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [str(i) * 50 for i in range(1000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    inputs = Dataset.resolve([str(path)])
    for read in (inputs.read, lambda: inputs.nbytes):
        with pytest.raises(DataError, match=rf"^{path} cannot be read as Parquet \("):
            read()


def test_a_column_that_one_file_lacks_is_null_there(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=[1], b=[1])
    second = parquet(tmp_path / "2.parquet", a=[2])
    assert Dataset.resolve([first, second]).read().to_pydict() == {"a": [1, 2], "b": [1, None]}
    inputs = Dataset.resolve([second, first])
    assert inputs.read().to_pydict() == {"a": [2, 1], "b": [None, 1]}
    assert inputs.reader(["b"]).read(0, 2).to_pydict() == {"b": [None, 1]}


def test_files_without_a_common_column_are_read_together(tmp_path: Path) -> None:
    paths = [parquet(tmp_path / "1.parquet", a=[1, 2]), parquet(tmp_path / "2.parquet", b=["x"])]
    assert Dataset.resolve(paths).reader(["b"]).read(0, 3).to_pydict() == {"b": [None, None, "x"]}


def test_a_column_that_some_files_have_and_folders_say_is_refused(tmp_path: Path) -> None:
    first = parquet(tmp_path / "k=1" / "a.parquet", a=[1], k=[1])
    second = parquet(tmp_path / "k=2" / "a.parquet", a=[1])
    assert refusal(str(tmp_path)) == (
        "a column must be in all files or in none where the names of folders say it too, but 'k' is in "
        f"{first} and not in {second}"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array(["x"])),
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array([True]), pa.array([1])),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.array([1], pa.timestamp("us"))),
        (pa.array([{"x": 1}]), pa.array([1])),
    ],
)
def test_types_that_do_not_go_together_are_refused_with_both_files(
    tmp_path: Path, one: pa.Array, other: pa.Array
) -> None:
    nothing = parquet(tmp_path / "0.parquet", a=pa.nulls(1))
    first, second = parquet(tmp_path / "1.parquet", a=one), parquet(tmp_path / "2.parquet", a=other)
    assert refusal(nothing, first, second) == (
        f"a column must have types that go together in all inputs, but 'a' is {one.type} in {first} "
        f"and {other.type} in {second}: write one of them again"
    )


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (pa.array(["x"]), pa.array(["x"], pa.large_string()), pa.large_string()),
        (pa.array(["x"], pa.string_view()), pa.array(["x"]), pa.large_string()),
        (pa.array(["x"]).dictionary_encode(), pa.array(["x"]), pa.string()),
        (pa.array([1], pa.int32()), pa.array([1]), pa.int64()),
        (pa.array([1]), pa.array([0.5]), pa.float64()),
        (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("ns")), pa.timestamp("ns")),
        (
            pa.array([{"p": 1, "q": "z"}]),
            pa.array([{"q": "z", "p": 1}], pa.struct({"q": pa.large_string(), "p": pa.int32()})),
            pa.struct({"p": pa.int64(), "q": pa.large_string()}),
        ),
        (
            pa.array([[{"p": 1}]]),
            pa.array([[{"q": "z"}]], pa.large_list(pa.struct({"q": pa.string()}))),
            pa.large_list(pa.struct({"p": pa.int64(), "q": pa.string()})),
        ),
    ],
)
def test_types_of_several_writers_become_the_one_that_holds_both(
    tmp_path: Path, one: pa.Array, other: pa.Array, kind: pa.DataType
) -> None:
    paths = [parquet(tmp_path / "1.parquet", a=one), parquet(tmp_path / "2.parquet", a=other)]
    table = Dataset.resolve(paths).read()
    assert table.schema.field("a").type == kind
    assert [len(chunk) for chunk in table["a"].chunks] == [1, 1]
    assert Dataset.resolve(paths[::-1]).read()["a"].to_pylist() == table["a"].to_pylist()[::-1]


def test_one_folder_of_pandas_polars_and_pyarrow_is_read_together(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 1, 2)
    nested = [{"p": 1, "q": "z"}] * 2
    columns: dict[str, list[Any]] = {"text": ["a", "b"], "n": [1, 2], "when": [when, when]}
    columns |= {"kind": ["u", "v"], "st": nested}
    frame = pd.DataFrame(columns, index=pd.Index([5, 6], name="ix"))
    frame.astype({"kind": "category"}).to_parquet(tmp_path / "1.parquet")
    polars = pl.DataFrame(columns, schema_overrides={"n": pl.Int32, "kind": pl.Categorical})
    polars.drop("when").write_parquet(tmp_path / "2.parquet")
    swapped = [{"q": "z", "p": 1}] * 2
    pq.write_table(pa.table({**columns, "st": swapped}), tmp_path / "3.pq")
    table = Dataset.resolve([str(tmp_path)]).read()
    assert table.num_rows == 6
    for name in ("text", "n", "kind", "st"):
        assert table[name].to_pylist() == columns[name] * 3
    assert table["when"].to_pylist() == [when, when, None, None, when, when]


def test_a_value_that_the_common_type_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    first, second = parquet(tmp_path / "1.parquet", a=[2**60 + 1]), parquet(tmp_path / "2.parquet", a=[0.5])
    with pytest.raises(DataError) as caught:
        Dataset.resolve([first, second]).read()
    assert str(caught.value).startswith(
        f"a column must have one type in all inputs, but 'a' is double in others, and {first}, where it is int64, "
        "holds a value that this does not: "
    )


# What writers keep beside the types


def test_the_index_of_pandas_and_the_categories_of_polars_stay(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": ["x", "y"]}, index=pd.Index([5, 6], name="ix"))
    frame.to_parquet(tmp_path / "1.parquet")
    pq.write_table(Dataset.resolve([str(tmp_path / "1.parquet")]).read(), tmp_path / "back.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "back.parquet"), frame)
    enums = pl.DataFrame({"e": pl.Series(["v", "u"], dtype=pl.Enum(["u", "v"]))})
    enums.write_parquet(tmp_path / "2.parquet")
    pq.write_table(Dataset.resolve([str(tmp_path / "2.parquet")]).read(), tmp_path / "back.parquet")
    assert pl.read_parquet(tmp_path / "back.parquet").equals(enums)
    assert pl.read_parquet(tmp_path / "back.parquet").schema == enums.schema


def test_what_may_not_be_null_and_what_fields_say_stay(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("a", pa.int64(), False, {"unit": "s"}), pa.field("b", pa.string())], {"from": "me"})
    for number in range(2):
        table = pa.table({"a": [number], "b": [None]}, schema=schema)
        pq.write_table(table, tmp_path / f"{number}.parquet")
    inputs = Dataset.resolve([str(tmp_path)])
    assert inputs.schema.equals(schema, check_metadata=True)
    assert inputs.read().schema.equals(schema, check_metadata=True)


def test_a_name_that_two_columns_share_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    assert refusal(str(path)) == f"columns must have names of their own, but {path} has 'a' twice"


# Memory


def test_bytes_in_memory_are_told_from_the_footers(tmp_path: Path) -> None:
    table = pa.table({"a": [f"{number:0100}" for number in range(1000)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < table.nbytes / 2
    assert Dataset.resolve([str(path), parquet(tmp_path / "b.parquet", a=["x"])]).nbytes == pytest.approx(
        table.nbytes, rel=0.1
    )


def test_text_that_repeats_counts_as_often_as_it_is_in_memory(tmp_path: Path) -> None:
    table = pa.table({"system": ["You are an assistant. " * 100] * 1000})
    path = parquet(tmp_path / "a.parquet", system=table["system"])
    assert Path(path).stat().st_size < table.nbytes / 100
    assert Dataset.resolve([path]).nbytes == pytest.approx(table.nbytes, rel=0.1)


def test_of_a_large_row_group_only_a_piece_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"a": [f"{number:01000}" for number in range(50_000)]}),
        path,
        compression="none",
        use_dictionary=False,
    )
    inputs = Dataset.resolve([str(path)])
    before = pa.total_allocated_bytes()
    reader = inputs.reader()
    for start in range(0, 50_000, 10_000):
        assert reader.read(start, start + 100)["a"].to_pylist()[-1] == f"{start + 99:01000}"
        assert pa.total_allocated_bytes() - before < inputs.nbytes / 4
    reader.close()
