"""Outputs for tests: what a job does to one, from its beginning to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmbatch.outputs import JOB, Output

TABLE = pa.table({"id": [1, 2, 3], "generated_text": ["a", None, "c"]})


def open_output(url: Path | str, *, inputs: Sequence[str] = (), **options: Any) -> Output:
    return Output.open(str(url), inputs=inputs, **options)


@contextlib.contextmanager
def begun(url: Path | str, **options: Any) -> Iterator[Output]:
    """An output that a job has begun to write, and that it goes from when the block ends."""
    output = open_output(url, **options)
    with output.locked():
        output.begin()
        output.work.write(JOB, b"{}")
        yield output


def stage(output: Output, table: pa.Table, *, part_rows: int = 2) -> tuple[list[str], list[int]]:
    """Names of the parts that a table is staged as, and their rows."""
    tables = [table.slice(start, part_rows) for start in range(0, max(1, table.num_rows), part_rows)]
    names = [f"part-{index:05d}-00" for index in range(len(tables))]
    return names, [output.stage(name, [part]) for name, part in zip(names, tables, strict=True)]


def finish(url: Path | str, table: pa.Table = TABLE, **options: Any) -> Output:
    """An output with rows, two in a part."""
    with begun(url, **options) as output:
        names, rows = stage(output, table)
        output.commit(names, {"summary": {"notes": ["one"]}}, rows)
    return output


def tree(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
