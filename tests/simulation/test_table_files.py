"""Files that a simulation writes are refused before it runs, or are there whole afterwards."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import ParameterError, StorageError
from llmbatch.simulation.table_files import TableFiles

TABLE = pa.table({"step": [1, 2]})


def test_tables_are_written_to_the_files_that_options_name(tmp_path: Path) -> None:
    options = {"steps_out": str(tmp_path / "steps.parquet"), "requests_out": None, "seed": 3}
    files = TableFiles.take(options, ["trace.parquet"])
    assert options == {"seed": 3}
    files.write({"steps_out": lambda: TABLE})
    assert pq.read_table(tmp_path / "steps.parquet").equals(TABLE)
    assert os.listdir(tmp_path) == ["steps.parquet"]


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("", "name a file"),
        (".", "name a file"),
        ("/dev/null", "name a file"),
        ("nowhere/steps.parquet", "lie in a folder that is there (create it first)"),
        ("trace.parquet", "be none of the traces, which it would replace"),
        ("link.parquet", "be none of the traces, which it would replace"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, rule: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.parquet").touch()
    Path("link.parquet").symlink_to("trace.parquet")
    with pytest.raises(ParameterError, match=rf"^steps_out must {re.escape(rule)}, got '"):
        TableFiles.take({"steps_out": file}, ["trace.parquet"])


def test_one_file_cannot_hold_both_tables(tmp_path: Path) -> None:
    file = str(tmp_path / "out.parquet")
    with pytest.raises(ParameterError, match=r"^requests_out must be another file than steps_out, got '"):
        TableFiles.take({"steps_out": file, "requests_out": f"{tmp_path}/./out.parquet"}, [])


def test_a_folder_that_went_meanwhile_ends_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    files = TableFiles.take({"steps_out": str(folder / "steps.parquet")}, [])
    folder.rmdir()
    with pytest.raises(StorageError, match=r"steps.parquet cannot be written: No such file or directory"):
        files.write({"steps_out": lambda: TABLE})
