"""Windows on their way to an endpoint of llmbatch, and answers on their way back.

A window is one Arrow stream: the columns that prompts are made of, and the key of each row as the last column. What is
asked of the rows is JSON in the schema's metadata. The endpoint renders, tokenises and plans: it has the tokenizer and
the KV, and the client needs no file of the model.

Answers come in frames: a kind, a length, a content. First the head, as JSON: what is known of the window when it is
planned. Then answers as they come, each frame an Arrow stream of rows (`AnswerSchema.rows`). The last frame says that
there are no more, or why there will be none.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.errors import DataError, InputError
from llmbatch.inference.options import Options
from llmbatch.openai.requests import BatchLines
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.remote.windows.expansion import expanded_bytes, spelled_out_bytes
from llmbatch.structured import Structure

PATH: Final = "/llmbatch/windows"
FORECAST: Final = "/llmbatch/forecasts"
VERSION: Final = 1  # of these messages
MOST_EXPANDED: Final = 1 << 30  # bytes of a window when it is decompressed
HEAD, ANSWERS, END, ERROR = b"HAZE"  # kinds of frames
_ASKED: Final = b"llmbatch"  # the metadata
_FRAME: Final = struct.Struct("<BI")
_PLAIN: Final = ("sampling_column", "continuation", "row_timeout")  # options that travel as they are


class SentWindow(NamedTuple):
    """A window as an endpoint has it: fields of options, the rows, and their keys."""

    asked: dict[str, Any]
    table: pa.Table
    keys: NDArray[np.uint64]


def columns_sent(options: Options) -> list[str]:
    """Name the columns that prompts and their parameters are made of, each once."""
    names = (*options.source.columns(), options.sampling_column, options.continuation)
    return list(dict.fromkeys(name for name in names if name is not None))


def write_window(options: Options, table: pa.Table, keys: NDArray[np.uint64]) -> bytes:
    """Write rows and what is asked of them."""
    source = options.source
    asked = {
        "version": VERSION,
        "source": None if isinstance(source, BatchLines) else asdict(source),
        "sampling": asdict(options.sampling),
        **{name: getattr(options, name) for name in _PLAIN},
    }
    whole = table.select(columns_sent(options)).append_column("key", pa.array(keys))
    whole = whole.replace_schema_metadata({_ASKED: json.dumps(asked)})
    return _written(whole, pa.ipc.IpcWriteOptions(compression="zstd"))


def read_window(data: bytes) -> SentWindow:
    """Read rows and what is asked of them. Raises InputError.

    Nothing is decompressed of a window that would take more than `MOST_EXPANDED` bytes then.
    """
    try:
        _check_bytes(expanded_bytes(data))
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        table.validate(full=True)  # offsets that point nowhere would be followed
        _check_bytes(spelled_out_bytes(table))
        asked = json.loads((table.schema.metadata or {})[_ASKED])
        version = asked.pop("version")
        keys = table.column(table.num_columns - 1).to_numpy().astype(np.uint64, casting="safe")
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"a window must be an Arrow stream of rows with their keys, got another ({error})") from None
    if version != VERSION:
        raise DataError(f"the version of a window must be {VERSION}, got {version!r}: client and endpoint differ")
    try:
        fields = _fields(asked)
    except (TypeError, LookupError) as error:
        raise DataError(f"what a window asks must be the options of a job, got others ({error})") from None
    return SentWindow(fields, table.remove_column(table.num_columns - 1).replace_schema_metadata(None), keys)


def _check_bytes(taken: int) -> None:
    if taken > MOST_EXPANDED:
        raise DataError(
            f"a window must take at most {MOST_EXPANDED:,} bytes when it is decompressed, got {taken:,}: "
            "send fewer rows at once (--window-rows)"
        )


def write_rows(rows: pa.RecordBatch) -> bytes:
    """Write answered rows."""
    return _written(pa.Table.from_batches([rows]), pa.ipc.IpcWriteOptions())


def read_rows(data: bytes) -> Iterator[pa.RecordBatch]:
    """Read answered rows. Raises what pyarrow raises."""
    with pa.ipc.open_stream(data) as reader:
        yield from reader


def frame(kind: int, content: bytes = b"") -> bytes:
    """Write a frame."""
    return _FRAME.pack(kind, len(content)) + content


class FrameReader:
    """Finds frames in bytes that come in pieces."""

    def __init__(self) -> None:
        self._held = bytearray()

    def read(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the content of each frame that is whole now."""
        self._held += piece
        while len(self._held) >= _FRAME.size:
            kind, length = _FRAME.unpack_from(self._held)
            if len(self._held) < _FRAME.size + length:
                return
            content = bytes(self._held[_FRAME.size : _FRAME.size + length])
            del self._held[: _FRAME.size + length]
            yield kind, content


def _written(table: pa.Table, how: pa.ipc.IpcWriteOptions) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=how) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Make fields of `Options` of what was asked. Raises InputError, TypeError and LookupError."""
    unknown = asked.keys() - {"source", "sampling", *_PLAIN}
    if unknown:
        raise InputError(f"what a window asks must be known, got {sorted(unknown)[0]!r}")
    sampling = {**asked["sampling"]}
    structure = sampling.pop("structured_outputs", None)
    made = None if structure is None else Structure(**structure)
    return {
        "source": BatchLines() if asked["source"] is None else PromptSource(**asked["source"]),
        "sampling": SamplingParams(**sampling, structured_outputs=made),
        **{name: asked[name] for name in _PLAIN},
    }
