"""How many bytes the rows of an Arrow stream take in memory, before they take it.

Arrow decompresses each buffer into as much memory as the buffer's first eight bytes ask for, and a few bytes can ask
for terabytes. Where buffers lie is in the head of their message, a flatbuffer, which pyarrow does not show. So the few
fields that are needed are read here, by the layout that Arrow's format says (Message.fbs and File.fbs). A buffer that
decompresses to another size than it asks for is an error in Arrow, so the sum is no estimate.
"""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from llmbatch.preprocess.columns import is_text

_HEADER: Final = 2  # fields of Message, by their number
_DATA: Final = 1  # of DictionaryBatch: a RecordBatch
_BUFFERS, _COMPRESSION = 2, 3  # of RecordBatch
_BUFFER: Final = struct.Struct("<qq")  # where a buffer begins in the body, and its bytes there


def expanded_bytes(data: bytes) -> int:
    """Sum up what the buffers of an Arrow stream take in memory. Raises what pyarrow raises, and struct.error."""
    return sum(_expanded(message) for message in pa.ipc.MessageReader.open_stream(data))


def spelled_out_bytes(table: pa.Table) -> int:
    """Sum up the bytes of the texts that the rows of dictionary columns stand for."""
    found = 0
    for column in table.columns:
        if pa.types.is_dictionary(column.type) and is_text(column.type):
            for chunk in column.chunks:
                lengths = pc.binary_length(chunk.dictionary.cast(pa.large_string()))
                found += pc.sum(lengths.take(chunk.indices)).as_py() or 0
    return found


def _expanded(message: pa.Message) -> int:
    if message.type not in ("record batch", "dictionary"):
        return 0
    body = message.body
    head = memoryview(message.metadata)
    batch = _pointed(head, _field(head, _pointed(head, 0), _HEADER))
    if message.type == "dictionary":
        batch = _pointed(head, _field(head, batch, _DATA))
    if not _field(head, batch, _COMPRESSION):
        return int(body.size)
    buffers = _pointed(head, _field(head, batch, _BUFFERS))
    (count,) = struct.unpack_from("<I", head, buffers)
    found = 0
    for number in range(count):
        begin, length = _BUFFER.unpack_from(head, buffers + 4 + number * _BUFFER.size)
        if length:
            (size,) = struct.unpack_from("<q", body, begin)
            found += size if size >= 0 else length  # -1: what follows is not compressed
    return found


def _field(head: memoryview, table: int, number: int) -> int:
    """Find where a field of a table lies; 0 where the table does not have it."""
    (back,) = struct.unpack_from("<i", head, table)
    names = table - back  # the table's list of offsets
    (size,) = struct.unpack_from("<H", head, names)
    place = 4 + 2 * number
    (offset,) = struct.unpack_from("<H", head, names + place) if place < size else (0,)
    return table + offset if offset else 0


def _pointed(head: memoryview, place: int) -> int:
    """Follow an offset."""
    (offset,) = struct.unpack_from("<I", head, place)
    return place + int(offset)
