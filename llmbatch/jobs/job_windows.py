"""The windows of a job: rows that are read, with the answers that earlier runs left whole or half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from llmbatch.errors import RowError
from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window import Window
from llmbatch.io.reading.dataset import RowReader
from llmbatch.io.row_hash import hash_rows
from llmbatch.io.writing.output import Output
from llmbatch.jobs.resuming.begun_tokens import BegunTokens
from llmbatch.jobs.resuming.prior_answers import JournalSource, PriorAnswers, keys_of
from llmbatch.jobs.resuming.resume import JobState
from llmbatch.jobs.resuming.row_keys import within
from llmbatch.storage.journal import Journal
from llmbatch.system.cancel_signal import CancelSignal


@dataclass(frozen=True, slots=True)
class JobWindows:
    """Makes windows, by their numbers."""

    worker: TableWorker
    output: Output
    state: JobState
    schema: pa.Schema  # of the input
    reader: RowReader
    older: PriorAnswers  # of earlier generations
    begun: BegunTokens
    refused: Mapping[int, RowError]  # rows that have an error already

    def window(self, number: int, cancelled: CancelSignal) -> Window:
        """Read the rows of a window, and what is answered of them."""
        state, first = self.state, number * self.state.window_rows
        table = self.reader.read(first, min(first + state.window_rows, state.rows))
        keys, contents = keys_of(table, first, state.command["id_column"]), hash_rows(table)
        journal = Journal.open(self.output.work, state.names.journal(number))
        kept = PriorAnswers.index([JournalSource(journal.records())], without_errors=False)
        schema = self.worker.answer_schema(self.schema)
        found = [answers.lookup(keys, contents, schema) for answers in (self.older, kept)]
        # What this generation answered anew counts; what it took over from an older one is not in its journal.
        mine = np.isin(found[0]["row"].to_numpy(), found[1]["row"].to_numpy(), invert=True)
        return self.worker.window(
            table,
            number=number,
            first=first,
            keys=keys,
            contents=contents,
            earlier=pa.concat_tables([found[0].filter(pa.array(mine)), found[1]]),
            begun=self.begun.of_window(keys, contents),
            refused={**self.output.refused(table), **within(self.refused, first, table.num_rows)},
            cancelled=cancelled,
        )
