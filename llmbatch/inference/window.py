"""Consecutive rows of a dataset with the requests that answer them: what is planned together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.report import RowCounts
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive rows of a dataset, rendered and tokenised."""

    number: int
    first: int  # row of the dataset
    table: pa.Table
    keys: NDArray[np.uint64]  # [rows]
    contents: NDArray[np.uint64]  # [rows] hashes of their values
    shard: RowRequests
    earlier: pa.Table  # of `ANSWER_ROWS`: answers that an earlier run found
    answered: NDArray[np.int32]  # [requests] tokens of these, 0 for requests that are to be run
    tree: PrefixTree  # of the requests
    rows: NDArray[np.int32]  # [answerable rows] grouped by request, each group in order
    bounds: NDArray[np.int64]  # [requests + 1] of the groups
    done: NDArray[np.bool_]  # [rows] in `earlier`

    @classmethod
    def of(
        cls,
        table: pa.Table,
        shard: RowRequests,
        *,
        number: int,
        first: int,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table,
    ) -> Window:
        """Build a window of which the rows in `earlier` are not answered again."""
        count = len(shard.requests)
        done = np.zeros(table.num_rows, np.bool_)
        done[earlier["row"].to_numpy()] = True
        rows = np.argsort(shard.request_of, kind="stable").astype(np.int32)
        rows = rows[np.count_nonzero(shard.request_of < 0) :]
        bounds = np.searchsorted(shard.request_of[rows], np.arange(count + 1)).astype(np.int64)
        generated = np.zeros(table.num_rows, np.int32)
        generated[earlier["row"].to_numpy()] = np.maximum(earlier["num_generated_tokens"].to_numpy(), 1)
        unanswered = np.zeros(count, np.bool_)
        unanswered[shard.request_of[~done & (shard.request_of >= 0)]] = True
        answered = np.zeros(count, np.int32)
        seen = rows[done[rows]]
        answered[shard.request_of[seen]] = generated[seen]
        answered[unanswered] = 0
        tree = PrefixTree.build(shard.requests.tokens, shard.requests.offsets)
        return cls(number, first, table, keys, contents, shard, earlier, answered, tree, rows, bounds, done)

    @property
    def requests(self) -> RequestBatch:
        """What is asked."""
        return self.shard.requests

    def counts(self, answered: pa.Table) -> RowCounts:
        """Sum up the table of this window's answers."""
        return RowCounts(
            rows=answered.num_rows,
            errors=answered.num_rows - answered["error"].null_count,
            duplicates=len(self.rows) - len(self.requests),
            input_tokens=_sum(answered["num_input_tokens"]),
            cached_tokens=_sum(answered["num_cached_tokens"]),
            output_tokens=_sum(answered["num_generated_tokens"]),
            unique_tokens=self.tree.unique_tokens,
        )

    def rows_of(self, requests: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
        """Find the rows that some requests answer, and for each which of the requests answers it."""
        counts = self.bounds[requests + 1] - self.bounds[requests]
        at = np.repeat(np.arange(len(requests)), counts)
        before = np.cumsum(counts) - counts
        places = self.bounds[requests][at] + np.arange(len(at)) - before[at]
        return self.rows[places], at


def _sum(column: pa.ChunkedArray) -> int:
    return int(np.sum(column.to_numpy(), dtype=np.int64))
