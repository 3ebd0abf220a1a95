"""Files, folders and globs to one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import DataError
from llmbatch.inputs import Inputs


def parquet(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def jsonl(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def refusal(*paths: str) -> str:
    with pytest.raises(DataError) as caught:
        Inputs.resolve(paths)
    return str(caught.value)


# Which files


def test_files_come_in_the_order_given_and_those_of_folders_and_globs_sorted(tmp_path: Path) -> None:
    last = parquet(tmp_path / "z.parquet", a=[9])
    for name in (
        "data/b.parquet",
        "data/a.parquet",
        "data/deep/c.parquet",
        "more/2.parquet",
        "more/10.parquet",
    ):
        parquet(tmp_path / name, a=[0])
    inputs = Inputs.resolve([last, str(tmp_path / "data"), str(tmp_path / "more" / "*.parquet")])
    assert [str(Path(path).relative_to(tmp_path)) for path in inputs.paths] == [
        "z.parquet",
        "data/a.parquet",
        "data/b.parquet",
        "data/deep/c.parquet",
        "more/10.parquet",
        "more/2.parquet",
    ]


def test_names_that_begin_with_an_underscore_or_a_dot_are_left_out(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", a=[1])
    for name in ("_b.parquet", ".c.parquet", "_work/d.parquet", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert len(Inputs.resolve([str(tmp_path)]).files) == 1
    assert len(Inputs.resolve([str(tmp_path / "*.parquet")]).files) == 1
    assert len(Inputs.resolve([str(tmp_path / "**" / "*.parquet")]).files) == 1


def test_a_hidden_folder_above_the_one_named_does_not_matter(tmp_path: Path) -> None:
    parquet(tmp_path / ".cache" / "a.parquet", a=[1])
    assert Inputs.resolve([str(tmp_path / ".cache")]).num_rows == 1
    assert Inputs.resolve([str(tmp_path / ".cache" / "*.parquet")]).num_rows == 1


def test_a_glob_that_matches_folders_takes_their_files(tmp_path: Path) -> None:
    parquet(tmp_path / "x1" / "a.parquet", a=[1])
    parquet(tmp_path / "x2" / "a.parquet", a=[2])
    assert Inputs.resolve([str(tmp_path / "x*")]).read()["a"].to_pylist() == [1, 2]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    assert Inputs.resolve([parquet(tmp_path / "a[1].parquet", a=[1])]).num_rows == 1


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1])
    assert Inputs.resolve([path, str(tmp_path), path]).num_rows == 1


def test_file_urls_are_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1])
    assert Inputs.resolve([f"file://{path}"]).read()["a"].to_pylist() == [1]


def test_identity_changes_with_a_file_and_not_without(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1])
    before = Inputs.resolve([path]).identity
    assert Inputs.resolve([path]).identity == before
    parquet(tmp_path / "a.parquet", a=[1, 2])
    assert Inputs.resolve([path]).identity != before


def test_no_input_is_refused() -> None:
    assert refusal() == "at least one input is needed, got none: name Parquet or JSONL files or folders"


@pytest.mark.parametrize("name", ["missing.parquet", ""])
def test_a_missing_file_is_refused(name: str) -> None:
    assert refusal(name) == f"an input must be a file, a folder or a glob, but there is nothing at {name!r}"


def test_a_glob_without_matches_is_refused(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*.parquet")
    assert refusal(pattern) == f"an input must name at least one file, but nothing matches {pattern!r}"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == (
        f"a folder must hold .parquet or .jsonl files, but there are none in {str(tmp_path)!r} "
        "(names that begin with _ or . do not count)"
    )


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.csv", "a")
    assert refusal(path) == (
        f"an input must be Parquet or JSONL, by its name, got {path!r}: "
        "known endings are .parquet, .pq, .jsonl, .ndjson, .json"
    )


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    one, two = parquet(tmp_path / "a.parquet", a=[1]), jsonl(tmp_path / "b.jsonl", "{}")
    assert refusal(str(tmp_path)) == f"all inputs must have one format, got Parquet ({one}) and JSONL ({two})"


def test_an_unknown_protocol_is_refused() -> None:
    assert refusal("nowhere://a.parquet").startswith("the input 'nowhere://a.parquet' cannot be reached: ")


# Parquet


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


def test_folder_names_make_no_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "year=2024" / "1.parquet", a=[1])
    assert Inputs.resolve([str(tmp_path)]).read().column_names == ["a"]


def test_a_file_without_rows_is_an_input(tmp_path: Path) -> None:
    inputs = Inputs.resolve([parquet(tmp_path / "1.parquet", a=pa.array([], pa.string()))])
    assert (inputs.num_rows, inputs.read().num_rows) == (0, 0)


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
    with pytest.raises(DataError, match=rf"^{path} cannot be read as Parquet \("):
        inputs.read()


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


# JSONL


def test_jsonl_rows_may_lack_keys_and_files_count_as_one(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "1.jsonl", '{"a": 1}', "", '{"b": "2024-01-01"}')
    second = jsonl(tmp_path / "2.jsonl", '{"a": 2.5, "c": null}')
    inputs = Inputs.resolve([first, second])
    assert inputs.schema == pa.schema({"a": pa.float64(), "b": pa.string(), "c": pa.null()})
    assert inputs.num_rows == 3
    assert inputs.read().to_pydict() == {
        "a": [1.0, None, 2.5],
        "b": [None, "2024-01-01", None],
        "c": [None, None, None],
    }


def test_jsonl_messages_become_lists_of_structs(tmp_path: Path) -> None:
    lines = [
        '{"m": [{"role": "user", "content": "a"}]}',
        '{"m": [{"role": "tool", "content": "b", "name": "f"}]}',
    ]
    table = Inputs.resolve([jsonl(tmp_path / "1.json", *lines)]).read()
    text = pa.string()
    assert table.schema.field("m").type == pa.list_(pa.struct({"role": text, "content": text, "name": text}))


def test_a_byte_order_mark_and_crlf_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}')
    assert Inputs.resolve([str(path)]).read().to_pydict() == {"a": [1, 2]}


def test_an_empty_jsonl_file_has_no_rows_and_no_columns(tmp_path: Path) -> None:
    inputs = Inputs.resolve([jsonl(tmp_path / "a.jsonl")])
    assert (inputs.num_rows, inputs.schema.names) == (0, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "none: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"a": 1} {"a": 2}', "none: Extra data: line 1 column 10 (char 9)"),
        (b"[1]", "a list"),
        (b"1", "a number"),
        (b"null", "null"),
        (b"\xff", "none: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line)
    assert refusal(str(path)) == f"JSONL holds one JSON object a line, but line 3 of {path} is {reason}"


def test_a_value_that_does_not_fit_its_column_is_refused_by_line(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "1.jsonl", '{"a": null}', '{"a": 1}')
    second = jsonl(tmp_path / "2.jsonl", '{"a": 2.5}', '{"a": "x"}')
    assert refusal(first, second) == (
        f"a column must have one type, but 'a' is a number in line 2 of {first} and a string in line 2 of {second}"
    )


@pytest.mark.parametrize("value", ["1180591620717411303424", '"\\ud800"', '[1, "x"]'])
def test_a_value_that_no_column_holds_is_refused_by_line(tmp_path: Path, value: str) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"a": null}', f'{{"a": {value}}}')
    assert refusal(path).startswith(f"column 'a' of line 2 of {path} cannot be held by a table: ")


def test_lists_of_two_types_in_one_column_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"a": [1]}', '{"a": ["x"]}')
    assert refusal(path).startswith("a column must have one type, but 'a' has none that holds all of its values: ")


TEXT = st.none() | st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.lists(st.fixed_dictionaries({"a": TEXT}, optional={"b": TEXT, "c": TEXT}), max_size=8))
@settings(max_examples=40)
def test_jsonl_gives_every_row_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str | None]]
) -> None:
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", *map(json.dumps, rows))
    table = Inputs.resolve([path]).read()
    assert table.num_rows == len(rows)
    assert table.to_pylist() == [{name: row.get(name) for name in table.column_names} for row in rows]
