"""What the order of a job's rows bought, simulated when the lengths of its answers are known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from llmbatch.inference.table_worker import TableWorker
from llmbatch.inference.window import Window
from llmbatch.inference.worker import Worker
from llmbatch.jobs.forecast import compare

_MOST_SIMULATED = 2_000  # requests; of more a report does not say what their order bought


def order_gain(worker: TableWorker, window: Window, answers: list[pa.RecordBatch]) -> float | None:
    """Return the seconds of the input's order over those of the one that was run, with the lengths as they came out.

    None if simulating both would take long, or cannot be done.
    """
    requests = window.requests
    if not isinstance(worker, Worker) or not answers or len(requests) > _MOST_SIMULATED or window.schema.turns:
        return None
    answered = pa.Table.from_batches(answers)
    lengths = np.zeros(window.table.num_rows, np.int32)
    lengths[answered["row"].to_numpy()] = answered["num_generated_tokens"].to_numpy()
    lengths = lengths[window.rows[window.bounds[:-1]]]
    buys = compare(requests, np.maximum(lengths, 1), worker.pool, worker.cost, worker.scheduling)
    return None if buys is None else buys.input_order_seconds / buys.seconds
