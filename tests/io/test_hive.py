"""Columns in the names of folders."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from llmbatch.io.reading.dataset import Dataset
from llmbatch.io.reading.hive import folder_values
from tests.support.datasets import jsonl, parquet, refusal


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/year=2024/month=01/a.parquet", {"year": "2024", "month": "01"}),
        ("/data/year=2024/more/a.parquet", {"year": "2024"}),
        ("/a.parquet", {}),
        ("/a=b.parquet", {}),
        ("/=1/year/a.parquet", {}),
        ("/text=a%2Fb%20c/na%3Dme=%C3%A4/a.parquet", {"text": "a/b c", "na=me": "ä"}),
        ("/text=a=b/none=/a.parquet", {"text": "a=b", "none": ""}),
        ("/x=__HIVE_DEFAULT_PARTITION__/a.parquet", {"x": None}),
        ("/x=1/x=2/a.parquet", {"x": "2"}),
    ],
)
def test_folders_name_a_key_and_a_value(path: str, values: dict[str, str | None]) -> None:
    assert dict(folder_values(path)) == values


def test_folders_are_columns_after_those_of_the_files(tmp_path: Path) -> None:
    parquet(tmp_path / "year=2023" / "lang=de" / "1.parquet", a=[1, 2])
    parquet(tmp_path / "year=2024" / "lang=fr" / "2.parquet", a=[3])
    inputs = Dataset.resolve([str(tmp_path)])
    assert inputs.schema == pa.schema({"a": pa.int64(), "year": pa.int64(), "lang": pa.string()})
    assert inputs.read().to_pydict() == {"a": [1, 2, 3], "year": [2023, 2023, 2024], "lang": ["de", "de", "fr"]}
    assert inputs.read().schema == inputs.schema


def test_folders_are_columns_of_jsonl_too(tmp_path: Path) -> None:
    jsonl(tmp_path / "x=1" / "a.jsonl", '{"a": "b"}')
    assert Dataset.resolve([str(tmp_path)]).read().to_pylist() == [{"a": "b", "x": 1}]


@pytest.mark.parametrize(
    ("names", "column"),
    [
        (["1", "-2", "+3", "007"], pa.array([1, -2, 3, 7])),
        (["1", "__HIVE_DEFAULT_PARTITION__"], pa.array([1, None])),
        (["1", "2.5"], pa.array(["1", "2.5"])),
        (["1", "٣"], pa.array(["1", "٣"])),
        (["1", ""], pa.array(["1", ""])),
        ([str(2**63 - 1), "1"], pa.array([2**63 - 1, 1])),
        ([str(2**63), "1"], pa.array([str(2**63), "1"])),
        (["__HIVE_DEFAULT_PARTITION__"], pa.array([None], pa.string())),
        (["2024-01-01", "True"], pa.array(["2024-01-01", "True"])),
    ],
)
def test_a_column_is_whole_numbers_where_all_its_values_are(tmp_path: Path, names: list[str], column: pa.Array) -> None:
    paths = [parquet(tmp_path / str(number) / f"x={name}" / "a.parquet", a=[0]) for number, name in enumerate(names)]
    table = Dataset.resolve([str(tmp_path)]).read()
    assert len(paths) == table.num_rows
    assert table["x"].combine_chunks() == column
    assert table.schema.field("x").type == column.type


def test_only_folders_below_what_was_named_are_columns(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a=1" / "b=2" / "c=3" / "x.parquet", x=[0])
    columns = {
        path: ["x"],
        str(tmp_path / "a=1" / "b=2"): ["x", "c"],
        str(tmp_path / "a=1" / "*" / "c=3" / "*.parquet"): ["x", "b", "c"],
        str(tmp_path / "a=1" / "*"): ["x", "b", "c"],
        str(tmp_path / "**" / "*.parquet"): ["x", "a", "b", "c"],
    }
    assert {name: Dataset.resolve([name]).schema.names for name in columns} == columns


def test_a_column_of_the_files_counts_more_than_a_folder_of_that_name(tmp_path: Path) -> None:
    parquet(tmp_path / "year=2024" / "1.parquet", year=["MMXXIV"])
    parquet(tmp_path / "2.parquet", year=["MMXXV"])
    assert Dataset.resolve([str(tmp_path)]).read().to_pydict() == {"year": ["MMXXV", "MMXXIV"]}


def test_a_file_outside_of_the_folders_is_refused(tmp_path: Path) -> None:
    inside = parquet(tmp_path / "x=1" / "1.parquet", a=[1])
    outside = parquet(tmp_path / "0.parquet", a=[1])
    assert refusal(str(tmp_path)) == (
        f"all inputs must have the same columns, but 'x' is in the folders of {inside} and not in those of {outside}"
    )


def test_columns_of_folders_alone_can_be_read(tmp_path: Path) -> None:
    parquet(tmp_path / "x=1" / "1.parquet", a=[1, 2, 3])
    jsonl(tmp_path / "json" / "y=b" / "1.jsonl", "{}", "{}")
    reader = Dataset.resolve([str(tmp_path / "*" / "*.parquet")]).reader(["x"])
    assert reader.read(1, 3).to_pydict() == {"x": [1, 1]}
    reader.close()
    assert Dataset.resolve([str(tmp_path / "json")]).read().to_pydict() == {"y": ["b", "b"]}
