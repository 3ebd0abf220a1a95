"""Outputs for tests: what a job does to one, from its beginning to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmbatch.io.writing.output import Output
from llmbatch.io.writing.parts import Part, rows_of
from llmbatch.io.writing.work_files import JOB

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


def stage(output: Output, table: pa.Table, *, part_rows: int = 2) -> list[Part]:
    """The parts that a table is staged as."""
    tables = [table.slice(start, part_rows) for start in range(0, max(1, table.num_rows), part_rows)]
    return [output.stage(f"part-{index:05d}-00", [part]) for index, part in enumerate(tables)]


def described(rows: int) -> dict[str, Any]:
    """What a job says of itself."""
    others: dict[str, Any] = {"command": {}, "files": [], "columns": [], "preserve_order": True}
    return {**others, "rows": rows, "summary": {"notes": ["one"]}}


def commit(output: Output, parts: Sequence[Part]) -> None:
    """Complete an output of these parts."""
    output.commit(parts, described(rows_of(parts)), rows=rows_of(parts))


def finish(url: Path | str, table: pa.Table = TABLE, **options: Any) -> Output:
    """An output with rows, two in a part."""
    with begun(url, **options) as output:
        commit(output, stage(output, table))
    return output


def tree(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
