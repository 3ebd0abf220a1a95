"""JSONL in and out: lines stay what they were, and no value is read as another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmbatch
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.io.reading import json_block
from llmbatch.io.reading import jsonl as module
from llmbatch.io.reading.dataset import Dataset
from tests.support.datasets import jsonl, refusal
from tests.support.jobs import Job, begun, rows
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder

SCHEMA = AnswerSchema().columns
LINES = [
    '{"id": "a", "text": "one", "x": NaN, "y": 1e400}',
    '{"id": "b", "text": "two", "x": 1.0, "y": -1E5, "deep": {"k1": [{"q": null}, {}]}}',
    '  {"id":"c","text":"three","deep":{"k2":"2024-01-01"},"big":12345678901234567890123,"big":null}  ',
    '{ "text" : "\\u00e9\\ud83d\\ude00" , "id" : "d" , "when": "2024-01-01" }',
]


def answer(model: str, source: str, out: Path, **options: Any) -> llmbatch.Report:
    return llmbatch.run(
        source, str(out), model=model, prompt="text", engine="simulated", max_tokens=3, dtype="float32", **options
    )


def test_lines_stay_what_they_were(model: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *LINES)
    answer(model, source, tmp_path / "out.jsonl")
    for before, after in zip(LINES, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        own = before.strip()[:-1].rstrip()
        assert after.startswith(f'{own}, "generated_text": "3 simulated tokens"')
        assert list(json.loads(after))[-len(SCHEMA) :] == SCHEMA.names
        assert json.loads(after).keys() - set(SCHEMA.names) == json.loads(before).keys()


def test_columns_of_folders_stand_after_the_line(model: str, tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "year=2024" / "a.jsonl", "{}", '{"text":"x"}')
    answer(model, str(tmp_path / "in"), tmp_path / "out.jsonl")
    first, second = (tmp_path / "out.jsonl").read_text().splitlines()
    assert first.startswith('{"year": 2024, "generated_text": null')
    assert second.startswith('{"text":"x", "year": 2024, "generated_text": "3 simulated tokens"')


def test_a_finished_output_is_gone_on_with_whatever_its_numbers_are(model: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *LINES)
    answer(model, source, tmp_path / "out.jsonl", id_column="id")
    jsonl(tmp_path / "in.jsonl", *LINES, '{"id": "e", "text": "five", "x": 0.5, "new": {"a": 1}}')
    report = answer(model, source, tmp_path / "out.jsonl", id_column="id")
    assert (report.rows, report.rows_resumed) == (5, 4)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5


def test_numbers_of_parquet_that_are_not_finite_are_null_and_the_same_row(job: Job) -> None:
    job = job.to("out.jsonl").having(id_column="id")
    table = pa.table({"id": ["a", "b"], "text": ["x", "y"], "n": [1, 2], "f": [float("nan"), float("inf")]})
    table = table.append_column("large", pa.array(["s", None], pa.large_string()))
    job.write(table)
    job.run()
    assert [json.loads(line)["f"] for line in job.out.read_text().splitlines()] == [None, None]
    more = table.set_column(0, "id", pa.array(["c", "d"])).set_column(1, "text", pa.array(["p", "q"]))
    job.write(pa.concat_tables([table, more]))
    with begun() as answered:
        job.run()
    assert answered == {"c", "d"}


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
@pytest.mark.parametrize("count", [0, 3])
def test_tensors_of_which_arrow_makes_no_empty_array_are_columns(job: Job, name: str, count: int) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(3, 2, 2))[:count]
    job = job.to(name)
    job.write(rows(count).append_column("x", tensors))
    assert job.run().rows == count
    assert job.run().finished_before
    if not job.out.suffix:
        assert pq.read_table(job.out)["x"].combine_chunks().equals(tensors)


def test_objects_with_keys_of_their_own_are_kept_as_text(model: str, tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "text": "x", "scores": {f"key {n}": n}}) for n in range(700)]
    source = jsonl(tmp_path / "in.jsonl", *lines)
    inputs = Dataset.resolve([source])
    assert inputs.read()["scores"].to_pylist() == [f'{{"key {n}": {n}}}' for n in range(700)]
    assert inputs.nbytes < 4 * Path(source).stat().st_size
    answer(model, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").stat().st_size < 10 * Path(source).stat().st_size


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_what_is_nested_deep_is_kept_as_text(model: str, tmp_path: Path, brackets: str) -> None:
    begin, end = ("[", "]") if brackets == "[]" else ('{"a": ', "}")
    deep = begin * 200 + "1" + end * 200
    source = jsonl(tmp_path / "in.jsonl", f'{{"text": "x", "deep": {deep}}}', '{"text": "y", "deep": null}')
    assert Dataset.resolve([source]).read()["deep"].to_pylist() == [deep, None]
    answer(model, source, tmp_path / "out.jsonl")
    assert [json.loads(line)["deep"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        json.loads(deep),
        None,
    ]


def test_what_is_nested_deeper_than_python_reads_is_refused_by_line(tmp_path: Path) -> None:
    levels = 2000
    path = jsonl(tmp_path / "in.jsonl", f'{{"a": {"[" * levels + "]" * levels}}}')
    assert refusal(path) == (
        f"JSONL holds one JSON object a line, but line 1 of {path} is none: maximum recursion depth exceeded while "
        "decoding a JSON array from a unicode string"
    )


def test_columns_are_text_where_any_block_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_block, "MOST_FIELDS", 3)
    monkeypatch.setattr(module, "_BLOCK", 7)
    values = [json.dumps({f"k{n}": n}) for n in range(5)]
    path = jsonl(tmp_path / "in.jsonl", *(f'{{"m": {value}}}' for value in values), '{"m": null}')
    table = Dataset.resolve([path]).read()
    assert table["m"].to_pylist() == [*values, None]
    other = jsonl(tmp_path / "other.jsonl", '{"m": "text"}')
    assert refusal(path, other) == (
        f"a column must have one type, but 'm' is an object in line 1 of {path} and a string in line 1 of {other}"
    )


@pytest.mark.parametrize("block", [1 << 20, 7])
@pytest.mark.parametrize(
    "values",
    [
        ['[{"role": "user", "content": "x"}]', '[{"role": "user", "content": [{"type": "text", "text": "y"}]}]'],
        ['[{"content": "x"}, null, {"content": ["y"]}]', "null"],
        ['{"stop": "x"}', "null", '{"stop": ["x", "y"]}'],
        ['{"a": 9223372036854775808}', '{"a": 0.5}'],
        ['{"a": 1}', '[{"a": 1}]'],
    ],
)
def test_objects_without_a_type_in_common_are_json_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, values: list[str]
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    path = jsonl(tmp_path / "in.jsonl", *(f'{{"n": {n}, "m": {value}}}' for n, value in enumerate(values)))
    table = Dataset.resolve([path]).read()
    assert table["m"].to_pylist() == [None if value == "null" else value for value in values]
    assert table["n"].to_pylist() == list(range(len(values)))


def test_messages_of_text_and_of_parts_are_answered_in_one_file(tmp_path: Path) -> None:
    """As OpenAI's clients write them."""
    model = tiny_model_folder(tmp_path / "model", "llama", chat_template=CHAT_TEMPLATE)
    contents = ['"hi"', '[{"type": "text", "text": "hi"}]']
    lines = [f'{{"m": [{{"role": "user", "content": {content}}}]}}' for content in contents]
    source = jsonl(tmp_path / "in.jsonl", *lines)
    out = tmp_path / "out.jsonl"
    llmbatch.run(source, str(out), model=model, messages="m", engine="simulated", max_tokens=3, dtype="float32")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["m"] for row in found] == [json.loads(line)["m"] for line in lines]
    assert found[0]["num_input_tokens"] == found[1]["num_input_tokens"] > 0


# What pyarrow alone would read otherwise


@pytest.mark.parametrize(
    "lines",
    [
        ['{"a": "2024-01-01"}', '{"a": "2024-01-01T00:00:00", "b": ["2024-01-01"]}'],
        ['{"a": 9007199254740993}', '{"a": 1}'],
        ['{"a": 1, "a": 2}'],
        ['{"a": 1e400}', '{"a": NaN}', '{"a": -Infinity}'],
        ['{"a": 1e17}', '{"a": 0.5}'],
        ['{"a": "\\ud83d\\ude00\\u0000"}', '{"é": 1}'],
        ['{"a": {"t": "2024-01-01"}}', '{"a": {"t": "x", "u": "12:00:00"}}'],
        ['\t{"a": 1} ', "  ", '{"a": 2}\r'],
        ['{"a": {}}', '{"a": {"b": []}}'],
    ],
)
@pytest.mark.parametrize("block", [1 << 19, 7])
def test_values_are_those_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], block: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    expected = pa.array([json.loads(line) for line in lines if line.strip()])
    table = Dataset.resolve([jsonl(tmp_path / "a.jsonl", *lines)]).read()
    assert str(table.combine_chunks().to_struct_array().combine_chunks().to_pylist()) == str(expected.to_pylist())
    assert table.schema.names == [field.name for field in expected.type]


@pytest.mark.parametrize(
    "line", [b'{"a": 1}{"a": 2}', b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a": 01}', b'{"a": 1} x', b'{"a": "\n"}']
)
def test_what_is_no_object_is_refused_where_pyarrow_would_take_it(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    assert refusal(str(path)).startswith(f"JSONL holds one JSON object a line, but line 2 of {path} is none: ")


VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(["2024-01-01", "12:00:00", "2024-01-01T00:00:00Z"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUE, max_size=3), min_size=1, max_size=4))
@settings(max_examples=200)
def test_pyarrow_reads_what_json_reads_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    data = "\n".join(map(json.dumps, rows)).encode()
    table = json_block.infer(json_block.Block("x", 1, data), pa.schema([]))
    if table is not None:
        expected = pa.array([json.loads(json.dumps(row)) for row in rows])
        assert table.to_pylist() == pa.Table.from_struct_array(expected).to_pylist()


class OfLines(Job):
    """A job on JSONL."""

    @property
    def source(self) -> Path:
        return self.folder / "in.jsonl"

    def write_lines(self, *lines: str) -> None:
        jsonl(self.source, *lines)


@pytest.mark.parametrize("options", [{}, {"preserve_order": False}], ids=["in order", "as finished"])
def test_a_job_on_lines_goes_on_with_lines_that_have_new_keys(job: Job, options: dict[str, Any]) -> None:
    lined = OfLines(job.model, job.folder, "out.jsonl", {**job.options, "id_column": "id", **options})
    lines = [json.dumps({**row, "x": 1}) for row in rows().to_pylist()]
    lined.write_lines(*lines)
    lined.run_until(25)
    more = [json.dumps({**row, "x": 0.5, "new": {"a": [1]}}) for row in rows(70).to_pylist()[60:]]
    if options:  # what is published as it finishes goes on with the same input only
        lined.run()
    lined.write_lines(*more, *lines)
    report = lined.run()
    assert report.rows_resumed >= 25
    written = lined.out.read_text().splitlines()
    own = sorted(line.partition(', "generated_text"')[0] + "}" for line in written)
    assert own == sorted([*more, *lines])
