"""The manifest of a finished output: which parts are complete, and which command made them.

For a single file it is a JSON file next to it. In a folder it is a Parquet file with the columns of the parts and no
rows, with the same JSON in its footer: any reader of the folder, even one that takes every file in it, finds only the
rows of parts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.errors import DataError
from llmbatch.io.sealed_json import is_plain

FORMAT_VERSION = 3  # the command names the model by its whole content
KEY = b"llmbatch"  # in the footer of a Parquet file

_CONTENT: Final = {
    "command": dict,
    "files": list,
    "rows": int,
    "columns": list,
    "preserve_order": bool,
    "summary": dict,
}

_PARQUET = b"PAR1"  # how such files begin
_WAY_OUT = "choose another name, or replace it with overwrite=True (--overwrite)"


def compose(
    names: Sequence[str], rows: Sequence[int], schema: pa.Schema | None, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the manifest: rows of each part, the schema if the format does not carry it, and the job's own fields."""
    parts = [{"name": name, "rows": count} for name, count in zip(names, rows, strict=True)]
    columns = {} if schema is None else {"schema": base64.b64encode(schema.serialize()).decode()}
    return {"format": FORMAT_VERSION, "parts": parts, **columns, **content}


def schema_of(manifest: Mapping[str, Any]) -> pa.Schema:
    """Return the columns that a manifest names."""
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(manifest["schema"])))


def encode(manifest: Mapping[str, Any]) -> bytes:
    """Encode the manifest as JSON bytes."""
    return json.dumps(manifest, indent=1).encode()


def encode_as_parquet(manifest: Mapping[str, Any], schema: pa.Schema) -> bytes:
    """Encode the manifest for a folder of parts of this schema."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema) as writer:
        writer.add_key_value_metadata({KEY.decode(): encode(manifest).decode()})
    return bytes(sink.getvalue())


def decode(data: bytes, url: str) -> dict[str, Any]:
    """Decode the manifest of the output at `url`. Raises `DataError` if it is damaged or of another version."""
    damaged = DataError(f"the manifest of the output {url} is damaged: {_WAY_OUT}")
    try:
        if data[:4] == _PARQUET:
            data = pq.read_metadata(pa.BufferReader(data)).metadata[KEY]
        manifest: dict[str, Any] = json.loads(data)
        version = manifest["format"]
    except (ValueError, RecursionError, TypeError, KeyError, pa.ArrowException, OSError):
        raise damaged from None
    if version != FORMAT_VERSION:
        raise DataError(
            f"the output {url} was written by another version of llmbatch, in format {version!r} and not "
            f"{FORMAT_VERSION}: {_WAY_OUT}"
        )
    try:
        good = all(is_plain(part["name"]) and type(part["rows"]) is int for part in manifest["parts"])
    except (TypeError, KeyError):
        raise damaged from None
    if not good or not all(isinstance(manifest.get(name), kind) for name, kind in _CONTENT.items()):
        raise damaged
    if sum(part["rows"] for part in manifest["parts"]) != manifest["rows"]:
        raise damaged
    return manifest
