"""A finished output: its manifest, and its rows for a job that goes on from there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError, StorageError
from tests.support.outputs import TABLE, begun, described, finish, open_output, tree

WAY_OUT = "choose another name, or replace it with overwrite=True (--overwrite)"


@pytest.fixture(params=["out", "out.parquet", "out.jsonl"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder and files, not there yet."""
    return tmp_path / "new" / str(request.param)


def manifest_of(out: Path) -> Path:
    return out / "_llmbatch.parquet" if out.suffix == "" else out.with_name(out.name + "._llmbatch.json")


def test_the_manifest_says_which_parts_are_whole_and_what_the_job_says_of_itself(tmp_path: Path) -> None:
    output = finish(tmp_path / "out")
    expected = {
        "format": 3,
        "parts": [{"name": "part-00000.parquet", "rows": 2}, {"name": "part-00001.parquet", "rows": 1}],
        **described(3),
    }
    footer = pq.read_metadata(tmp_path / "out" / "_llmbatch.parquet")
    assert json.loads(footer.metadata[b"llmbatch"]) == expected
    assert footer.num_rows == 0
    assert output.manifest() == expected
    assert open_output(tmp_path / "out").manifest() == expected


def test_a_manifest_that_is_damaged_or_of_another_version_proves_nothing(out: Path) -> None:
    finish(out)
    manifest = open_output(out).manifest()
    assert manifest is not None
    without_summary = {key: value for key, value in manifest.items() if key != "summary"}
    traversing = {**manifest, "parts": [{"name": "../x", "rows": 3}]}
    cut = {**manifest, "parts": manifest["parts"][:-1]}
    others: list[object] = [without_summary, traversing, cut, {"format": 3}, []]
    damaged = [json.dumps(one) for one in others]
    for content in (*damaged, "{", "[" * 100_000):
        manifest_of(out).write_text(content)
        with pytest.raises(DataError) as caught:
            open_output(out).manifest()
        assert str(caught.value) == f"the manifest of the output {out} is damaged: {WAY_OUT}"
    manifest_of(out).write_text('{"format": 2}')
    with pytest.raises(DataError) as caught:
        open_output(out).manifest()
    assert str(caught.value) == (
        f"the output {out} was written by another version of llmbatch, in format 2 and not 3: {WAY_OUT}"
    )
    with pytest.raises(DataError, match=re.escape(WAY_OUT)):
        open_output(out).check_free(replace_foreign=False)
    open_output(out).check_free(replace_foreign=True)


def test_an_output_of_an_earlier_version_is_known_and_replaced(tmp_path: Path) -> None:
    new = finish(tmp_path / "out").manifest()
    (tmp_path / "out" / "_llmbatch.parquet").unlink()
    (tmp_path / "out" / "_llmbatch.json").write_text(json.dumps(new))
    assert open_output(tmp_path / "out").manifest() == new
    open_output(tmp_path / "out").check_free(replace_foreign=False)
    finish(tmp_path / "out", TABLE.slice(0, 1))
    assert tree(tmp_path / "out") == ["_llmbatch.parquet", "part-00000.parquet"]


def test_an_output_that_lost_a_part_is_refused(tmp_path: Path) -> None:
    finish(tmp_path / "out")
    (tmp_path / "out" / "part-00001.parquet").unlink()
    with pytest.raises(DataError) as caught:
        open_output(tmp_path / "out").manifest()
    assert str(caught.value) == (
        f"the output {tmp_path / 'out'} is finished but its part part-00001.parquet is gone: put it back, or start "
        "over with restart=True (--restart)"
    )
    with begun(tmp_path / "out") as output:
        output.start_over()
    finish(tmp_path / "out")
    assert open_output(tmp_path / "out").manifest() is not None


def test_one_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    finish(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    assert open_output(tmp_path / "out.jsonl").manifest() is None
    assert finish(tmp_path / "out.jsonl").manifest() is not None


# Rows


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_rows_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    table = pa.table(
        {
            "count": pa.array([1, None, 3], pa.int8()),
            "share": pa.array([0.1, 1.0, None], pa.float32()),
            "nested": pa.array([[{"x": "é\n"}], [], None], pa.list_(pa.struct([("x", pa.large_string())]))),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "error": pa.nulls(3, pa.string()),
        }
    )
    output = finish(tmp_path / name, table)
    manifest = output.manifest()
    assert manifest is not None
    for columns in (table.column_names, ["kind", "count"]):
        parts = [pa.concat_tables(output.finished_tables(part["name"], columns)) for part in manifest["parts"]]
        assert pa.concat_tables(parts).equals(table.select(columns))


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_no_rows_are_one_table_all_the_same(tmp_path: Path, name: str) -> None:
    output = finish(tmp_path / name, TABLE.slice(0, 0))
    manifest = output.manifest()
    assert manifest is not None
    part = manifest["parts"][0]["name"]
    assert pa.concat_tables(output.finished_tables(part, ["id"])).equals(TABLE.slice(0, 0).select(["id"]))


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.timestamp("us"), pa.list_(pa.date32()), pa.map_(pa.string(), pa.int8())], ids=str
)
def test_no_job_goes_on_from_rows_that_jsonl_does_not_hold_as_they_were(tmp_path: Path, kind: pa.DataType) -> None:
    output = finish(tmp_path / "out.jsonl", pa.table({"a": [1], "b": pa.nulls(1, kind)}))
    with pytest.raises(DataError) as caught:
        output.finished_tables("out.jsonl", ["a", "b"])
    assert str(caught.value) == (
        f"JSONL does not hold column 'b' of type {kind} as it was, so no job goes on from {tmp_path / 'out.jsonl'}: "
        "choose another output, or start over with restart=True (--restart)"
    )
    assert pa.concat_tables(output.finished_tables("out.jsonl", ["a"])).to_pydict() == {"a": [1]}


def test_a_part_that_was_damaged_stops_the_job(tmp_path: Path) -> None:
    output = finish(tmp_path / "out")
    part = tmp_path / "out" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(StorageError, match=rf"^{part} is damaged \(Parquet magic bytes not found in footer"):
        list(output.finished_tables("part-00000.parquet", ["id"]))
