"""Tokens of answers that have begun: kept beside the journals, so that a kill loses the last seconds' alone.

Long answers take minutes, and hundreds of them are under way at once. What all of them have so far is one file in the
work folder, which is replaced as a whole: it is as small as what an engine has in flight, 4 bytes a token, and never
half written. An answer that has ended is in a journal before the first file without it is written. A job that goes on
gives each row its tokens back, and the engine computes their keys and values again with those of the prompt
(BatchGen calls a sequence a coroutine that yields, 4.2; here its state is its tokens).

Rows whose windows have not joined yet keep what the file had of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.window import Window
from llmbatch.io.sealed_json import damage
from llmbatch.io.writing.work_files import BEGUN
from llmbatch.preprocess.request_batch import BegunAnswers
from llmbatch.storage.journal import pack_record, unpack_record
from llmbatch.storage.location import Location

_SCHEMA: Final = pa.schema(
    {"key": pa.uint64(), "content": pa.uint64(), "ask": pa.int32(), "tokens": pa.large_list(pa.int32())}
)


@dataclass(frozen=True, slots=True)
class BegunTokens:
    """Answers that have begun, of rows that are known by their keys and the hashes of their contents."""

    record: pa.RecordBatch  # of `_SCHEMA`, one entry an answer

    def __len__(self) -> int:
        return int(self.record.num_rows)

    @classmethod
    def none(cls) -> BegunTokens:
        """Make the record of no answer."""
        return cls(pa.RecordBatch.from_pylist([], schema=_SCHEMA))

    @classmethod
    def of(cls, begun: Sequence[tuple[Window, BegunAnswers]]) -> BegunTokens:
        """Gather what windows have."""
        batches = [
            pa.RecordBatch.from_arrays(
                [
                    pa.array(window.keys[answers.rows]),
                    pa.array(window.contents[answers.rows]),
                    pa.array(answers.asks),
                    answers.column,
                ],
                schema=_SCHEMA,
            )
            for window, answers in begun
        ]
        return cls(pa.concat_batches([cls.none().record, *batches]))

    @classmethod
    def read(cls, work: Location) -> BegunTokens:
        """Read what an earlier run kept. Raises `DataError` where it is damaged."""
        data = work.read(BEGUN)
        if data is None:
            return cls.none()
        record = unpack_record(data)
        if record is None or record.schema != _SCHEMA:
            raise damage(work, BEGUN, f"remove {work.shown(BEGUN)}, and answers that have begun begin anew")
        return cls(record)

    def write(self, work: Location) -> None:
        """Keep it in the work folder, in the place of what was kept before."""
        work.write(BEGUN, pack_record(self.record))

    def without(self, keys: NDArray[np.uint64]) -> BegunTokens:
        """Leave out the rows with these keys."""
        return BegunTokens(self.record.filter(pa.array(~np.isin(self.record["key"].to_numpy(), keys))))

    def joined(self, more: BegunTokens) -> BegunTokens:
        """Return these answers, and others behind them."""
        if not len(more):
            return self
        return BegunTokens(pa.concat_batches([self.record, more.record]))

    def of_window(self, keys: NDArray[np.uint64], contents: NDArray[np.uint64]) -> BegunAnswers:
        """Find the answers of a window's rows, which have these keys and contents; rows that changed have none."""
        wanted, asks = self.record["key"].to_numpy(), self.record["ask"].to_numpy()
        order = np.argsort(keys, kind="stable")
        place = np.searchsorted(keys[order], wanted)
        found = np.flatnonzero(place < len(keys))
        rows = order[place[found]]
        same = (keys[rows] == wanted[found]) & (contents[rows] == self.record["content"].to_numpy()[found])
        found, rows = found[same], rows[same].astype(np.int32)
        return BegunAnswers.of_column(rows, asks[found], self.record["tokens"], found)
