"""JSONL files: types from all rows, one line at fault named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import DataError
from llmbatch.io.reading import jsonl as module
from llmbatch.io.reading.dataset import Dataset
from tests.support.datasets import jsonl, refusal


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of about one line, so that types come together from many."""
    monkeypatch.setattr(module, "_BLOCK", 7)


def test_rows_may_lack_keys_and_files_count_as_one(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "1.jsonl", '{"a": 1}', "", '{"b": "2024-01-01"}')
    second = jsonl(tmp_path / "2.jsonl", '{"a": 2.5, "c": null}')
    inputs = Dataset.resolve([first, second])
    assert inputs.schema == pa.schema({"a": pa.float64(), "b": pa.string(), "c": pa.null()})
    assert inputs.num_rows == 3
    assert inputs.read().to_pydict() == {
        "a": [1.0, None, 2.5],
        "b": [None, "2024-01-01", None],
        "c": [None, None, None],
    }


def test_messages_become_lists_of_structs(tmp_path: Path) -> None:
    lines = [
        '{"m": [{"role": "user", "content": "a"}]}',
        '{"m": [{"role": "tool", "content": "b", "name": "f"}]}',
    ]
    table = Dataset.resolve([jsonl(tmp_path / "1.json", *lines)]).read()
    text = pa.string()
    assert table.schema.field("m").type == pa.list_(pa.struct({"role": text, "content": text, "name": text}))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", "null", "3"], pa.float64()),
        (["null", "true"], pa.bool_()),
        (["[]", "[1]", "[0.5, null]"], pa.list_(pa.float64())),
        (['{"x": 1}', '{"y": [{"z": 1}]}', '{"y": [{"q": "a", "z": 0.5}], "x": null}'], None),
    ],
)
def test_types_come_together_from_all_blocks(tmp_path: Path, values: list[str], kind: pa.DataType | None) -> None:
    inputs = Dataset.resolve([jsonl(tmp_path / "a.jsonl", *(f'{{"a": {value}}}' for value in values))])
    expected = pa.array([json.loads(value) for value in values])
    assert inputs.schema.field("a").type == expected.type == (kind or expected.type)
    assert inputs.read()["a"].combine_chunks() == expected


@pytest.mark.usefixtures("small_blocks")
def test_columns_stand_in_the_order_in_which_they_come_up(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", '{"z": 1, "b": 2}', '{"a": 1, "b": 2}', '{"y": 0}')
    assert Dataset.resolve([path]).schema.names == ["z", "b", "a", "y"]


def test_rows_without_keys_are_rows(tmp_path: Path) -> None:
    inputs = Dataset.resolve([jsonl(tmp_path / "a.jsonl", "{}", "{}", "{}")])
    assert (inputs.num_rows, inputs.read().num_rows, inputs.read().column_names) == (3, 3, [])


def test_a_byte_order_mark_and_crlf_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}')
    assert Dataset.resolve([str(path)]).read().to_pydict() == {"a": [1, 2]}


def test_an_empty_file_has_no_rows_and_no_columns(tmp_path: Path) -> None:
    inputs = Dataset.resolve([jsonl(tmp_path / "a.jsonl")])
    assert (inputs.num_rows, inputs.schema.names, inputs.read().num_rows) == (0, [], 0)


@pytest.mark.parametrize("data", [b"\n", b" \n\t\r\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kept", [{}, {"json_columns": ("body",), "text_columns": ("custom_id",)}])
def test_a_file_of_empty_lines_has_no_rows_and_adds_none(tmp_path: Path, data: bytes, kept: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    inputs = Dataset.resolve([str(tmp_path / "a.jsonl")], **kept)
    assert (inputs.num_rows, inputs.schema.names, inputs.read().num_rows) == (0, [], 0)
    other = jsonl(tmp_path / "b.jsonl", '{"a": 1}', *[""] * 100_000, '{"a": 2}')
    assert Dataset.resolve([str(tmp_path / "a.jsonl"), other], **kept).read().to_pydict() == {"a": [1, 2]}


def test_bytes_in_memory_are_those_of_the_table(tmp_path: Path) -> None:
    inputs = Dataset.resolve([jsonl(tmp_path / "a.jsonl", *('{"a": "some text"}' for _ in range(1000)))])
    assert inputs.nbytes == pytest.approx(inputs.read().nbytes, rel=0.1)


# Compressed


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_files_are_read_to_their_end(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b'{"a": 1}\n{"a":') + compress(b' 2}\n\n{"a": 3}'))  # as `cat` joins them
    assert Dataset.resolve([str(path)]).read().to_pydict() == {"a": [1, 2, 3]}


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_a_compressed_file_that_is_cut_off_is_refused(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b'{"a": 1}\n' * 1000)[:-5])
    assert refusal(str(path)) == f"{path} cannot be read: Truncated compressed stream"


def test_a_file_that_is_not_compressed_is_refused_by_its_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl.gz", "{}")
    assert refusal(path) == f"{path} cannot be read: zlib inflate failed: incorrect header check"


# Lines at fault


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
@pytest.mark.parametrize("block", [1 << 20, 7])
def test_a_bad_line_is_refused_by_file_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, reason: str, block: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line)
    assert refusal(str(path)) == f"JSONL holds one JSON object a line, but line 3 of {path} is {reason}"


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_a_value_that_does_not_fit_its_column_is_refused_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    first = jsonl(tmp_path / "1.jsonl", '{"a": null}', '{"a": 1}')
    second = jsonl(tmp_path / "2.jsonl", '{"a": 2.5}', '{"a": "x"}')
    assert refusal(first, second) == (
        f"a column must have one type, but 'a' is a number in line 2 of {first} and a string in line 2 of {second}"
    )


@pytest.mark.parametrize(
    "value", ["1" * 30, "-9223372036854775809", "[[9223372036854775808]]", "[0.5, 9223372036854775808]"]
)
def test_a_whole_number_beyond_64_bits_is_refused_in_plain_words(tmp_path: Path, value: str) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"b": 1, "a": null}', f'{{"b": 1, "a": {value}}}')
    assert refusal(path) == (
        f"column 'a' of line 2 of {path} cannot be held by a table (a whole number does not fit in 64 bits, with its "
        "sign): write it as text, in quotes"
    )


def test_half_of_a_character_is_refused_by_line_in_plain_words(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"a": "x"}', '{"a": "cut \\ud83d"}')
    assert refusal(path) == (
        f"column 'a' of line 2 of {path} cannot be held by a table (it has half of a character, '\\ud83d'): write the "
        "whole character, or none"
    )


def test_a_value_that_no_column_holds_is_refused_by_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"b": 1, "a": null}', '{"b": 1, "a": [1, "x"]}')
    assert refusal(path).startswith(f"column 'a' of line 2 of {path} cannot be held by a table: ")


def test_a_name_that_no_column_has_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"a": 1, "\\ud800": 1}')
    assert refusal(path).startswith("a column must have one type, but '\\ud800' has none that holds all of its values")


@pytest.mark.parametrize("block", [1 << 20, 7])
@pytest.mark.parametrize(("one", "other"), [("[1]", '["x"]'), ("[1]", '[{"b": 1}]'), (str(2**60 + 1), "0.5")])
def test_values_of_one_kind_that_share_no_type_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, one: str, other: str
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    path = jsonl(tmp_path / "1.jsonl", f'{{"a": {one}}}', f'{{"a": {other}}}')
    found = refusal(path)
    assert found.startswith("a column must have one type, but 'a' is ")
    assert found.endswith(
        f" in line 1 of {path} and another in line 2 of {path}: write its values as JSON text, which messages and "
        "tools may be"
    )


@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "1.jsonl", '{"a": 1}', '{"a": 2}')
    inputs = Dataset.resolve([path])
    jsonl(tmp_path / "1.jsonl", '{"a": 1}', '{"a": "x"}')
    with pytest.raises(DataError) as caught:
        inputs.read()
    assert str(caught.value) == (
        f"inputs must stay as they are while a job runs, but {path} has changed or is gone: put it back or start over"
    )


TEXT = st.none() | st.text(st.characters(codec="utf-8"), max_size=5)
VALUE: st.SearchStrategy[Any] = (
    TEXT | st.fixed_dictionaries({}, optional={"x": TEXT, "y": TEXT}) | st.lists(TEXT, max_size=2)
)


@given(
    st.lists(st.fixed_dictionaries({"a": TEXT}, optional={"b": TEXT, "c": TEXT}), max_size=8),
    st.integers(1, 40),
)
@settings(max_examples=100)
def test_every_row_is_given_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str | None]], block: int
) -> None:
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", *map(json.dumps, rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        table = Dataset.resolve([path]).read()
    assert table.num_rows == len(rows)
    assert table.to_pylist() == [{name: row.get(name) for name in table.column_names} for row in rows]


@given(st.lists(st.fixed_dictionaries({"a": VALUE}), max_size=6), st.integers(1, 40))
@settings(max_examples=100)
def test_small_blocks_have_the_types_of_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], block: int
) -> None:
    path = jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", *map(json.dumps, rows))

    def outcome() -> str:
        try:
            return str(Dataset.resolve([path]).read().combine_chunks())
        except DataError as error:
            return str(error).split(": ")[0]

    whole = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert outcome() == whole
