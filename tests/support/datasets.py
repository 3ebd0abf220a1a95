"""Small inputs for tests: files as they are written by others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError
from llmbatch.io.reading.dataset import Dataset


def parquet(path: Path, **columns: Any) -> str:
    """A Parquet file of these columns; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def jsonl(path: Path, *lines: str) -> str:
    """A file of these lines; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def refusal(*paths: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """What is said of inputs that are refused."""
    with pytest.raises(DataError) as caught:
        Dataset.resolve(paths, storage_options)
    return str(caught.value)
