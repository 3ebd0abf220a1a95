"""A finished output: its manifest and its rows, for a job that goes on from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.errors import DataError
from llmbatch.io.json_values import LINE, json_holds
from llmbatch.io.reading.discovery import InputFile
from llmbatch.io.reading.json_block import TEXT
from llmbatch.io.reading.jsonl import JsonlFiles
from llmbatch.io.writing.destination import Destination
from llmbatch.io.writing.formats import CODECS, Arrow, Parquet, StagedFormat, read_tables
from llmbatch.io.writing.manifest import decode, encode, encode_as_parquet, schema_of


@dataclass(frozen=True, slots=True)
class Finished:
    """The finished output at a destination, if there is one."""

    destination: Destination

    def manifest(self) -> dict[str, Any] | None:
        """Read what the job wrote last, or return None if there is no such output.

        Raises `DataError` if it is damaged, of another version, or names a part that is gone.
        """
        to = self.destination
        data = self._read()
        if data is None:
            return None
        manifest = decode(data, to.url)
        if to.file is not None:
            return manifest if to.has_file() else None
        there = set(to.folder.names())
        for part in manifest["parts"]:
            # A reader of parts that appear while a job works may have taken them away.
            if part["name"] not in there and manifest["preserve_order"]:
                raise DataError(
                    f"the output {to.url} is finished but its part {part['name']} is gone: put it back, or start "
                    "over with restart=True (--restart)"
                )
        return manifest

    def encoded(self, manifest: Mapping[str, Any]) -> bytes:
        """Encode the manifest for this destination. The parts that it names already have their names."""
        to = self.destination
        if to.file is not None:
            return encode(manifest)
        there = set(to.folder.names())
        part = next((part["name"] for part in manifest["parts"] if part["name"] in there), None)
        if part is None:  # their reader has taken all of them away
            return encode_as_parquet(manifest, pa.schema([]))
        with to.folder.open(part) as stream:
            return encode_as_parquet(manifest, pq.read_schema(stream))

    def names(self) -> list[str]:
        """List the names of its files, missing ones included; none if the manifest cannot be read."""
        data = self._read()
        if data is not None:
            with contextlib.suppress(DataError):
                manifest = decode(data, self.destination.url)
                to = self.destination
                beside = [to.errors, to.columns] if "form" in manifest else []
                return [*(part["name"] for part in manifest["parts"]), *beside]
        return []

    def tables(self, part: str, columns: Sequence[str], parquet: StagedFormat) -> Iterator[pa.Table]:
        """Yield the rows of a part, a few at a time and at least one table, with those of these columns it has.

        Raises `DataError` if JSONL does not hold them as they were, `StorageError` if the part is damaged.
        """
        to = self.destination
        manifest = None if to.file is None else self.manifest()
        if manifest is not None and "form" in manifest:
            return self._staged_columns(columns)
        if to.suffix == ".parquet":
            if to.folder.size(part) is None:
                raise DataError(
                    f"the part {part} of {to.url} is gone, and with it the rows to go on from: put it back, or start "
                    "over with restart=True (--restart)"
                )
            return read_tables(parquet, to.folder, part, columns)
        assert manifest is not None, "a part is that of a finished output"
        schema = schema_of(manifest)
        there = set(schema.names) - {LINE}
        columns = [name for name in columns if name in there]
        if LINE not in schema.names:  # then no column was JSON text in the input, but some may have been of its type
            schema = pa.schema([(field.name, pa.string() if field.type == TEXT else field.type) for field in schema])
        for name in columns:
            if not json_holds(schema.field(name).type):
                raise DataError(
                    f"JSONL does not hold column {name!r} of type {schema.field(name).type} as it was, so no job goes "
                    f"on from {to.url}: choose another output, or start over with restart=True (--restart)"
                )
        size = to.folder.size(part) or 0
        file = InputFile(to.folder, part, "JSONL", CODECS[to.suffix], size, {}, ())
        rows = JsonlFiles((file,), schema, (manifest["parts"][0]["rows"],), size).batches(0, 0, columns)
        return chain([pa.Table.from_batches([], pa.schema([schema.field(name) for name in columns]))], rows)

    def compression(self) -> str | None:
        """Name the compression of its Parquet, as `COMPRESSIONS` do, or return None where no values are there."""
        to = self.destination
        there = set(to.folder.names())
        for name in [name for name in self.names() if name in there and name.endswith(Parquet.suffix)]:
            with to.folder.open(name) as stream:
                written = pq.read_metadata(stream)
            if written.num_row_groups and written.num_columns:
                found = written.row_group(0).column(0).compression.lower()
                return "none" if found == "uncompressed" else found
        return None

    def _staged_columns(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of lines that have another form than rows, from the file that holds them as columns."""
        to = self.destination
        if to.folder.size(to.columns) is None:
            raise DataError(
                f"{to.columns}, which holds the rows of {to.url} as columns, is gone, and with it the rows to go on "
                "from: put it back, or start over with restart=True (--restart)"
            )
        return read_tables(Arrow(), to.folder, to.columns, columns)

    def _read(self) -> bytes | None:
        """Read the manifest, under the name that this version or an earlier one gave it."""
        to = self.destination
        data = to.folder.read(to.manifest)
        return to.folder.read(to.old_manifest) if data is None and to.old_manifest != to.manifest else data
