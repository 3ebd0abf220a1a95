"""A job: dataset in, dataset out, or a forecast of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmbatch.answers import output_schema
from llmbatch.forecast import Forecast, compare, forecast
from llmbatch.inputs import Inputs
from llmbatch.options import Options
from llmbatch.outputs import Output
from llmbatch.progress import Progress, Silence
from llmbatch.report import Report
from llmbatch.worker import Answered, Worker

SIMULATED_AFTERWARDS = 2_000  # requests; of more a report does not say what their order bought


def run(
    inputs: str | Sequence[str],
    output: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Answer every row of a dataset and write the rows, in their order, with the answers' columns.

    `inputs` are Parquet or JSONL files, folders or globs; `output` a folder for Parquet parts, or one
    `.parquet` or `.jsonl` file. `options` are those of `LLMOperator`. Nothing is created before command, input
    and model are checked. The output appears whole or not at all; if it is there already from the same command,
    its report is returned with `finished_before` set. Raises `InputError` where the command or its input is
    wrong, `JobError` where the job cannot be finished.

        report = run("questions.parquet", "answers", model="Qwen/Qwen3-8B", prompt="question", chat=True)
    """
    begun = time.perf_counter()
    progress = progress or Silence()
    built = Options.build(**options)
    paths = [inputs] if isinstance(inputs, str) else list(inputs)
    source = Inputs.resolve(paths)
    everything = [*paths, *source.paths]
    target = Output.open(output, inputs=everything, fingerprint=_fingerprint(built, source), overwrite=overwrite)
    if target.finished:
        return replace(Report.from_dict(target.summary), finished_before=True)
    worker = Worker(built)
    worker.check(source.schema)
    target.check(output_schema(source.schema))
    table = source.read()
    worker.load()
    try:
        target.begin()
        answered = worker.answer(table, progress)
        target.write(answered.table)
        seconds = time.perf_counter() - begun - worker.load_seconds
        report = replace(answered.report, seconds=seconds, output=output, order_gain=_order_gain(worker, answered))
        target.commit(report.to_dict())
    except BaseException:
        target.abort()
        raise
    return report


def _order_gain(worker: Worker, answered: Answered) -> float | None:
    """What the order bought, simulated with the lengths as they came out; None where that would take long."""
    if len(answered.requests) > SIMULATED_AFTERWARDS:
        return None
    buys = compare(answered.requests, answered.lengths, worker.pool, worker.cost, worker.options)
    return None if buys is None else buys.input_order_seconds / buys.seconds


def explain(inputs: str | Sequence[str], **options: Any) -> Forecast:
    """What `run` would do with these inputs and options, without loading weights or running the model.

    Raises `InputError` like `run`.
    """
    built = Options.build(**options)
    source = Inputs.resolve([inputs] if isinstance(inputs, str) else list(inputs))
    worker = Worker(built)
    worker.check(source.schema)
    return forecast(worker, source.read())


def _fingerprint(options: Options, source: Inputs) -> str:
    """A digest of everything that decides the output."""
    content = json.dumps([repr(options), source.identity], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
