"""Parquet files: one schema of all, rows read a piece at a time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError
from llmbatch.inputs import Inputs
from tests.datasets import parquet, refusal


def test_rows_of_all_files_are_read_in_order_and_columns_found_by_name(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=[1, 2], b=["x", None])
    second = parquet(tmp_path / "2.parquet", b=["y"], a=[3])
    inputs = Inputs.resolve([first, second])
    assert inputs.schema == pa.schema({"a": pa.int64(), "b": pa.string()})
    assert inputs.num_rows == 3
    assert inputs.read().to_pydict() == {"a": [1, 2, 3], "b": ["x", None, "y"]}
    assert inputs.read().schema == inputs.schema


def test_a_column_of_nothing_but_nulls_takes_the_type_it_has_elsewhere(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=pa.nulls(1))
    second = parquet(tmp_path / "2.parquet", a=["x"])
    assert Inputs.resolve([first, second]).read().to_pydict() == {"a": [None, "x"]}
    assert Inputs.resolve([second, first]).schema == pa.schema({"a": pa.string()})


def test_a_file_without_rows_is_an_input(tmp_path: Path) -> None:
    inputs = Inputs.resolve([parquet(tmp_path / "1.parquet", a=pa.array([], pa.string()))])
    assert (inputs.num_rows, inputs.read().num_rows, inputs.nbytes) == (0, 0, 0)


def test_names_with_dots_are_names(tmp_path: Path) -> None:
    table = {"a": [1], "a.b": [2], "b": [{"c": 3}]}
    inputs = Inputs.resolve([parquet(tmp_path / "1.parquet", **table)])
    assert inputs.read().to_pydict() == table
    assert inputs.reader(["a"]).read(0, 1).to_pydict() == {"a": [1]}
    assert inputs.reader(["b", "a.b"]).read(0, 1).to_pydict() == {"b": [{"c": 3}], "a.b": [2]}


def test_dictionaries_stay_dictionaries(tmp_path: Path) -> None:
    column = pa.array(["x", None, "y"]).dictionary_encode()
    paths = [parquet(tmp_path / f"{number}.parquet", a=column[number:]) for number in range(2)]
    table = Inputs.resolve(paths).read()
    assert table.schema.field("a").type == column.type
    assert table["a"].to_pylist() == ["x", None, "y", None, "y"]


@pytest.mark.parametrize("keep", [0, 3, -9])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, a=list(range(100)))
    path.write_bytes(path.read_bytes()[:keep])
    text = refusal(str(path))
    assert text.startswith(f"{path} cannot be read as Parquet (")
    assert text.endswith("): write it anew or leave it out")
    assert "\n" not in text


def test_a_damaged_page_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [str(i) * 50 for i in range(1000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    inputs = Inputs.resolve([str(path)])
    for read in (inputs.read, lambda: inputs.nbytes):
        with pytest.raises(DataError, match=rf"^{path} cannot be read as Parquet \("):
            read()


def test_a_column_that_one_file_lacks_is_refused(tmp_path: Path) -> None:
    first = parquet(tmp_path / "1.parquet", a=[1], b=[1])
    second = parquet(tmp_path / "2.parquet", a=[1])
    text = "all inputs must have the same columns, but 'b' is in {} and not in {}"
    assert refusal(first, second) == text.format(first, second)
    assert refusal(second, first) == text.format(first, second)


def test_a_column_of_two_types_is_refused(tmp_path: Path) -> None:
    nothing = parquet(tmp_path / "0.parquet", a=pa.nulls(1))
    first = parquet(tmp_path / "1.parquet", a=[1])
    second = parquet(tmp_path / "2.parquet", a=["x"])
    assert refusal(nothing, first, second) == (
        f"a column must have one type in all inputs, but 'a' is int64 in {first} and string in {second}"
    )


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
    assert Inputs.resolve([str(path), parquet(tmp_path / "b.parquet", a=["x"])]).nbytes == pytest.approx(
        table.nbytes, rel=0.1
    )


def test_text_that_repeats_counts_as_often_as_it_is_in_memory(tmp_path: Path) -> None:
    table = pa.table({"system": ["You are an assistant. " * 100] * 1000})
    path = parquet(tmp_path / "a.parquet", system=table["system"])
    assert Path(path).stat().st_size < table.nbytes / 100
    assert Inputs.resolve([path]).nbytes == pytest.approx(table.nbytes, rel=0.1)


def test_of_a_large_row_group_only_a_piece_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"a": [f"{number:01000}" for number in range(50_000)]}),
        path,
        compression="none",
        use_dictionary=False,
    )
    inputs = Inputs.resolve([str(path)])
    before = pa.total_allocated_bytes()
    reader = inputs.reader()
    for start in range(0, 50_000, 10_000):
        assert reader.read(start, start + 100)["a"].to_pylist()[-1] == f"{start + 99:01000}"
        assert pa.total_allocated_bytes() - before < inputs.nbytes / 4
    reader.close()
