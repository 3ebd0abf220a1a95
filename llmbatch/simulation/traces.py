"""Request traces as columns: source, prompt and answer length of each request, and shared prefixes.

Shared prefixes are written as ids of blocks, by one rule for every kind of file. A row lists ids of the leading blocks
of its prompt, and two rows share the blocks before the first place where their lists differ or one of them ends. So an
id has its meaning at its place only. The part of a prompt beyond its ids is the row's own, equal to nothing, and a row
without ids shares nothing. Three consequences of the rule carry all operations on traces here:

- A block may be split into smaller ones that all keep its id. So traces of different block sizes are put
  together at the greatest common divisor.
- A system prompt is ids of its own put before those of a row, and rows after different ones share nothing.
- A list may be cut short to make the rest of a prompt new each time the row is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import DataError, ParameterError
from llmbatch.planning.prefix_tree import PrefixTree

SYSTEM_PROMPT = 32  # tokens

_LIMIT = 2**30  # lengths and token ids lie below it, ids of hashed blocks from it on

_TYPES = {
    "source": (pa.string(), "text"),
    "prompt_tokens": (pa.int64(), "integers"),
    "output_tokens": (pa.int64(), "integers"),
    "prompt_ids": (pa.large_list(pa.int32()), "lists of token ids (int32)"),
    "hash_ids": (pa.large_list(pa.int64()), "lists of integers"),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """`n` requests, in order. Ids mean the same in all traces that were read together."""

    names: tuple[str, ...]  # the sources
    source: NDArray[np.int32]  # [n] index into names
    prompt_lengths: NDArray[np.int32]  # [n] tokens, at least 1
    output_lengths: NDArray[np.int32]  # [n] tokens, at least 1
    blocks: NDArray[np.int32]  # ids of the leading blocks of all rows; of row i
    offsets: NDArray[np.int64]  # [n + 1]     blocks[offsets[i]:offsets[i + 1]]
    block_size: int  # tokens; the last block of a prompt may be shorter

    def __len__(self) -> int:
        """Return the number of requests."""
        return self.prompt_lengths.size

    def tree(self) -> PrefixTree:
        """Build the prefix tree of the prompts."""
        return PrefixTree.from_blocks(self.blocks, self.offsets, self.prompt_lengths, self.block_size)

    def take(self, rows: NDArray[np.integer[Any]]) -> Trace:
        """Select the requests at `rows`, in that order; a row taken twice shares its listed ids with itself."""
        offsets = _offsets(np.diff(self.offsets)[rows])
        return Trace(
            self.names,
            self.source[rows],
            self.prompt_lengths[rows],
            self.output_lengths[rows],
            _gather(self.blocks, self.offsets[rows], offsets, 1),
            offsets,
            self.block_size,
        )

    def first(self, requests: int) -> Trace:
        """Return the first requests. Raises `ParameterError` if there are fewer, or less than 1 is asked for."""
        if not 1 <= requests <= len(self):
            raise ParameterError(f"requests must be 1 to the {len(self)} of the traces, got {requests}")
        return self.take(np.arange(requests))

    def cut(self, keep: NDArray[np.integer[Any]]) -> Trace:
        """Keep only the first `keep` [n] ids of each request: the rest of its prompt becomes its own."""
        offsets = _offsets(keep)
        return replace(self, blocks=_gather(self.blocks, self.offsets[:-1], offsets, 1), offsets=offsets)

    def split(self, size: int) -> Trace:
        """Split the blocks into blocks of `size` tokens, which must divide the present size."""
        parts = self.block_size // size
        if parts == 1:
            return self
        # A shorter last block has fewer parts.
        offsets = _offsets(np.minimum(np.diff(self.offsets) * parts, -(-self.prompt_lengths // size)))
        blocks = _gather(self.blocks, self.offsets[:-1], offsets, parts)
        return replace(self, blocks=blocks, offsets=offsets, block_size=size)

    def with_answers_cut(self, most: int) -> Trace:
        """Cut answers to at most `most` tokens."""
        return replace(self, output_lengths=np.minimum(self.output_lengths, np.int32(most)))

    def with_system_prompts(self, rows: NDArray[np.bool_]) -> Trace:
        """Put 32 tokens, equal within a source, before the requests where `rows` [n] is true."""
        trace = self.split(math.gcd(self.block_size, SYSTEM_PROMPT))
        lead = SYSTEM_PROMPT // trace.block_size  # blocks of a system prompt, all of one id
        offsets = _offsets(np.diff(trace.offsets) + lead * rows)
        blocks = np.empty(offsets[-1], np.int32)
        places = offsets[:-1][rows, None] + np.arange(lead)
        blocks[places] = trace.blocks.max(initial=-1) + 1 + self.source[rows, None]
        others = np.ones(blocks.size, np.bool_)
        others[places] = False
        blocks[others] = trace.blocks
        lengths = self.prompt_lengths + np.int32(SYSTEM_PROMPT) * rows
        return replace(trace, prompt_lengths=lengths, blocks=blocks, offsets=offsets)


def join(traces: Sequence[Trace]) -> Trace:
    """Join traces that were read together, one after another. Sources of one name become one."""
    size = math.gcd(*(trace.block_size for trace in traces))
    parts = [trace.split(size) for trace in traces]
    names = dict.fromkeys(name for trace in traces for name in trace.names)
    index = {name: place for place, name in enumerate(names)}
    return Trace(
        tuple(index),
        np.concatenate([np.array([index[name] for name in part.names], np.int32)[part.source] for part in parts]),
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.output_lengths for part in parts]),
        np.concatenate([part.blocks for part in parts]),
        _offsets(np.concatenate([np.diff(part.offsets) for part in parts])),
        size,
    )


def put_together(traces: Sequence[Trace]) -> Trace:
    """Combine traces that were read together, as a job runs them.

    Rows with ids are taken exactly as they are; the others get the system prompt of their source.
    """
    together = join(traces)
    unknown = np.diff(together.offsets) == 0
    return together.with_system_prompts(unknown) if unknown.any() else together


def read_traces(paths: Sequence[str | Path], *, hash_block: int = 16) -> list[Trace]:
    """Read the trace of each Parquet file.

    Columns: `output_tokens`; `prompt_tokens`, or `prompt_ids` (exact tokens, compared between files too); `hash_ids`
    (ids of blocks of `hash_block` tokens, equal only within a file), `source` (else the file's name). Raises
    `DataError`, naming the file and the first row, if a column is missing or breaks its rule.
    """
    if not paths:
        raise ParameterError("traces must be at least one, got none: name Parquet files")
    if not 1 <= hash_block < _LIMIT:
        raise ParameterError(f"hash_block (--hash-block) must be 1 to {_LIMIT - 1} tokens, got {hash_block}")
    traces = []
    next_id = _LIMIT
    for path in paths:
        trace = _read(Path(path), hash_block, next_id)
        next_id = max(next_id, int(trace.blocks.max(initial=0)) + 1)
        traces.append(trace)
    return traces


def _read(path: Path, hash_block: int, next_id: int) -> Trace:
    """Read one file; the ids of its hashed blocks count from `next_id`."""
    columns = _columns(path)
    output = _lengths(columns, "output_tokens", path)
    names, source = _sources(columns, path)
    if "prompt_ids" in columns:
        blocks, offsets = _exact(columns, path)
        return Trace(names, source, np.diff(offsets).astype(np.int32), output, blocks, offsets, 1)
    prompt = _lengths(columns, "prompt_tokens", path)
    if "hash_ids" not in columns:  # any block size will do; this one lets a system prompt be one block
        return Trace(names, source, prompt, output, np.empty(0, np.int32), _offsets(0 * prompt), SYSTEM_PROMPT)
    ids, offsets = _lists(columns["hash_ids"])
    counts, fitting = np.diff(offsets), -(-prompt // hash_block)
    if (row := _first(counts != fitting)) is not None:
        raise DataError(
            f"hash_ids must be one for each block of {hash_block} tokens, but row {row} of {path} has {counts[row]} "
            f"for {prompt[row]} tokens, not {fitting[row]}: give the block size they were made with (--hash-block)"
        )
    blocks = (np.unique(ids, return_inverse=True)[1] + next_id).astype(np.int32)
    return Trace(names, source, prompt, output, blocks, offsets, hash_block)


def _columns(path: Path) -> dict[str, Any]:
    """Read the columns of `_TYPES` that have values in the file, cast; none but `source` has nulls."""
    if not path.is_file():
        raise DataError(f"a trace must be a Parquet file, but there is none at {path}: check the path")
    try:
        with pq.ParquetFile(path) as parquet:
            table = parquet.read(columns=[name for name in parquet.schema_arrow.names if name in _TYPES])
            rows = parquet.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"a trace must be a Parquet file, but {path} cannot be read as one ({reason})") from None
    if not rows:
        raise DataError(f"a trace must have at least one request, but {path} has no rows: leave it out")
    columns = {name: table[name] for name in table.column_names if table[name].null_count < rows}
    if "output_tokens" not in columns:
        raise DataError(f"a trace must have output_tokens (the lengths of its answers), but {path} has none: add them")
    if "prompt_tokens" not in columns and "prompt_ids" not in columns:
        raise DataError(
            "a trace must have prompt_tokens (the lengths of its prompts) or prompt_ids (the prompts), "
            f"but {path} has neither: add one of them"
        )
    for name, column in columns.items():
        kind, words = _TYPES[name]
        try:
            columns[name] = column.cast(kind).combine_chunks()
        except pa.ArrowException:
            raise DataError(
                f"the column {name} of a trace must hold {words}, but that of {path} holds {column.type}: convert it"
            ) from None
        if name != "source":
            _check_nulls(columns[name], name, path)
    return columns


def _check_nulls(column: Any, name: str, path: Path) -> None:
    row = _first(column.is_null().to_numpy(zero_copy_only=False))
    if row is None and pa.types.is_large_list(column.type):
        values, offsets = column.flatten(), _lists(column)[1]
        if (place := _first(values.is_null().to_numpy(zero_copy_only=False))) is not None:
            row = _row_of(place, offsets)
    if row is not None:
        raise DataError(f"the column {name} of a trace must have no nulls, but row {row} of {path} has one")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """Find the first place where `wrong` is true."""
    return int(np.argmax(wrong)) if wrong.any() else None


def _row_of(place: int, offsets: NDArray[np.int64]) -> int:
    """Find the row whose list has the value at `place`."""
    return int(np.searchsorted(offsets, place, side="right")) - 1


def _sources(columns: dict[str, Any], path: Path) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """List the sources in order of appearance, and that of each row; the default is the file's name without ending."""
    if "source" not in columns:
        return (path.stem,), np.zeros(len(columns["output_tokens"]), np.int32)
    encoded = columns["source"].fill_null(path.stem).dictionary_encode()
    return tuple(encoded.dictionary.to_pylist()), encoded.indices.to_numpy().astype(np.int32)


def _lengths(columns: dict[str, Any], name: str, path: Path) -> NDArray[np.int32]:
    lengths: NDArray[np.int64] = columns[name].to_numpy()
    if (row := _first((lengths < 1) | (lengths >= _LIMIT))) is not None:
        raise DataError(
            f"{name} must lie in [1, {_LIMIT - 1}], but row {row} of {path} has {lengths[row]}: "
            "correct it or leave the row out"
        )
    return lengths.astype(np.int32)


def _exact(columns: dict[str, Any], path: Path) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens of exact prompts, and their offsets."""
    tokens, offsets = _lists(columns["prompt_ids"])
    counts = np.diff(offsets)
    if (place := _first((tokens < 0) | (tokens >= _LIMIT))) is not None:
        raise DataError(
            f"token ids must lie in [0, {_LIMIT - 1}], but row {_row_of(place, offsets)} of {path} has "
            f"{tokens[place]} in prompt_ids"
        )
    if (row := _first(counts == 0)) is not None:
        raise DataError(f"a prompt must have at least one token, but row {row} of {path} has no prompt_ids")
    if "prompt_tokens" in columns:
        lengths = columns["prompt_tokens"].to_numpy()
        if (row := _first(lengths != counts)) is not None:
            raise DataError(
                f"prompt_tokens must be the number of prompt_ids, but row {row} of {path} has {lengths[row]} "
                f"and {counts[row]}: correct the column or leave it out"
            )
    return tokens, offsets


def _lists(column: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return values and offsets of an Arrow list column, from 0."""
    offsets = column.offsets.to_numpy()
    return column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def _offsets(counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Compute where rows of so many ids begin, and where the last ends: int64 [n + 1]."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=offsets[1:])
    return offsets


@compiled
def _gather(blocks: Any, starts: Any, offsets: Any, parts: int) -> Any:
    """Gather rows of ids, laid out by `offsets`.

    Row i reads `blocks` from `starts[i]` on, each id `parts` times.
    """
    gathered = np.empty(offsets[-1], np.int32)
    for i in range(starts.size):
        for k in range(offsets[i + 1] - offsets[i]):
            gathered[offsets[i] + k] = blocks[starts[i] + k // parts]
    return gathered
