"""Consecutive rows of a dataset with the requests that answer them: what is planned together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.inference.answers.row_parts import RowParts
from llmbatch.inference.answers.schema import AnswerSchema, errors_of, tokens_of
from llmbatch.inference.report import RowCounts

if TYPE_CHECKING:
    from llmbatch.inference.conversations import TurnParts
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.request_batch import Asks, BegunAnswers, RequestBatch, RowRequests


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive rows of a dataset, rendered and tokenised."""

    number: int
    first: int  # row of the dataset
    table: pa.Table
    keys: NDArray[np.uint64]  # [rows]
    contents: NDArray[np.uint64]  # [rows] hashes of their values
    shard: RowRequests
    schema: AnswerSchema
    earlier: pa.Table  # of `AnswerSchema.rows`: answers that an earlier run found
    answered: NDArray[np.int32]  # [requests] tokens of these, 0 for requests that are to be run
    tree: PrefixTree  # of the requests
    rows: NDArray[np.int32]  # [asks] of answerable rows, grouped by request, each group in order
    bounds: NDArray[np.int64]  # [requests + 1] of the groups
    done: NDArray[np.bool_]  # [rows] in `earlier`
    parts: RowParts | TurnParts | None  # what ended of rows with several requests; None where every row has one

    @classmethod
    def of(
        cls,
        table: pa.Table,
        shard: RowRequests,
        schema: AnswerSchema,
        *,
        number: int,
        first: int,
        keys: NDArray[np.uint64],
        contents: NDArray[np.uint64],
        earlier: pa.Table | None = None,
    ) -> Window:
        """Build a window of which the rows in `earlier` are not answered again."""
        earlier = schema.rows.empty_table() if earlier is None else earlier
        asks = shard.asks or Asks.single(shard.request_of)
        count, row_of = len(shard.requests), asks.rows
        done = np.zeros(table.num_rows, np.bool_)
        done[earlier["row"].to_numpy()] = True
        order = np.argsort(asks.requests, kind="stable")
        rows = row_of[order]
        bounds = np.searchsorted(asks.requests[order], np.arange(count + 1)).astype(np.int64)
        generated = np.zeros(table.num_rows, np.int32)
        generated[earlier["row"].to_numpy()] = np.maximum(earlier["num_generated_tokens"].to_numpy(), 1)
        unanswered = np.zeros(count, np.bool_)
        unanswered[asks.requests[~done[row_of]]] = True
        answered = np.zeros(count, np.int32)
        seen = done[row_of]
        answered[asks.requests[seen]] = generated[row_of[seen]]
        answered[unanswered] = 0
        tree = PrefixTree.build(shard.requests.tokens, shard.requests.offsets)
        parts = None if shard.asks is None and schema.is_plain else RowParts(asks)
        return cls(
            number, first, table, keys, contents, shard, schema, earlier, answered, tree, rows, bounds, done, parts
        )

    @property
    def requests(self) -> RequestBatch:
        """What is asked."""
        return self.shard.requests

    def counts(self, answers: Sequence[pa.RecordBatch]) -> RowCounts:
        """Sum up this window's answers, batches of `AnswerSchema.rows`."""
        answered = pa.Table.from_batches(answers, schema=self.schema.rows)
        inputs, outputs = tokens_of(answered)
        return RowCounts(
            rows=answered.num_rows,
            errors=errors_of(answered),
            duplicates=len(self.rows) - len(self.requests),
            input_tokens=inputs,
            cached_tokens=int(answered["num_cached_tokens"].to_numpy().sum(dtype=np.int64)),
            output_tokens=outputs,
            unique_tokens=self._unique_tokens(self.that_ran(answers)),
        )

    def that_ran(self, answers: Sequence[pa.RecordBatch]) -> NDArray[np.bool_]:
        """Tell which requests an engine was given, by the answers: bool [requests]."""
        rows = np.zeros(self.table.num_rows, np.bool_)
        for batch in answers:
            rows[batch["row"].to_numpy()] = batch["attempts"].to_numpy() > 0
        ran = np.concatenate(([0], np.cumsum(rows[self.rows])))[self.bounds]
        return np.diff(ran) > 0

    def _unique_tokens(self, ran: NDArray[np.bool_]) -> int:
        """Count the prompt tokens of some requests, shared ones once."""
        requests = self.requests
        tree = self.tree
        if requests.begun.any():
            tree = PrefixTree.build(*requests.prompts())
        return (tree if ran.all() else tree.select(ran)).unique_tokens

    def begun_answers(self, requests: NDArray[np.int32], tokens: Sequence[NDArray[np.int32]]) -> BegunAnswers:
        """Name answers that have begun by their rows.

        Turns, and answers that log-probabilities are told of, are left out: there is more to them than tokens.
        """
        asked = self.requests
        tells = np.array([one.logprobs is not None for one in asked.params], np.bool_)[asked.params_index[requests]]
        tells |= asked.scored[requests] < asked.prompt_lengths[requests]
        kept = np.flatnonzero(~tells) if not self.schema.turns else np.empty(0, np.intp)
        requests = requests[kept]
        rows, asks = self.rows[self.bounds[requests]], self.shard.asks
        which = np.zeros(len(rows), np.int32)
        if asks is not None:
            pairs = zip(rows.tolist(), requests.tolist(), strict=True)
            which[:] = [int(np.argmax(asks.of(row) == request)) for row, request in pairs]
        return BegunAnswers(rows, which, [tokens[i] for i in kept.tolist()])

    def rows_of(self, requests: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
        """Find the rows that some requests answer, and for each which of the requests answers it."""
        counts = self.bounds[requests + 1] - self.bounds[requests]
        at = np.repeat(np.arange(len(requests)), counts)
        before = np.cumsum(counts) - counts
        places = self.bounds[requests][at] + np.arange(len(at)) - before[at]
        return self.rows[places], at
