"""`map_dataset`: a model over a Ray dataset, with shared prefixes in one place and nothing run twice but what was lost.

`ds.map_batches(LLMOperator(...))` cuts a dataset wherever its blocks end. Here it is read twice. At once, tasks outline
each row (`llmbatch.operators.ray.sharding`), and the driver cuts shards of equal predicted seconds that keep prefixes
together. Later, when the dataset that is returned is executed, a row is looked up, sorted to its shard, and each shard
is one call of an actor; the calls of an actor overlap in its engine (`llmbatch.operators.ray.actor`). That is an
ordinary lazy pipeline, so Ray Data's autoscaling, retries and checkpoints do with it what they do with others.

A shard travels as one row, a table in Arrow's stream format: so that a batch of one row is a whole shard, however many
blocks Ray Data cuts it into, and Ray Data wants a batch size where there are GPUs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import ray
import ray.data
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from llmbatch.arguments import finite, flag, one_of, refusal, whole
from llmbatch.choices import PLANS, DType, PlanName
from llmbatch.errors import DataError, ParameterError
from llmbatch.inference.answers.schema import AnswerSchema
from llmbatch.inference.options import Options
from llmbatch.inference.planners import check_undecided, outliner_options, planner_options
from llmbatch.inference.worker import Worker
from llmbatch.io.row_hash import hash_rows
from llmbatch.operators.columns_read import columns_read
from llmbatch.operators.ray.actor import SharedEngine
from llmbatch.operators.ray.cluster import actor_pool, check_resources, memory_of_actor, resources_of
from llmbatch.operators.ray.device_plan import on_planned_devices
from llmbatch.operators.ray.in_flight import InFlightRows, left_behind
from llmbatch.operators.ray.ledger import ActorHome
from llmbatch.operators.ray.ledger_actor import LedgerBeats, LedgerReports, start_ledger
from llmbatch.operators.ray.lending.loan_client import LoanClient
from llmbatch.operators.ray.lending.place import Place
from llmbatch.operators.ray.shard_call import ShardCall
from llmbatch.operators.ray.sharding import OUTLINE, ROWS_PER_SHARD, Shards, cut, outline
from llmbatch.operators.workers import worker_of
from llmbatch.system.memory import take_at_most

if TYPE_CHECKING:
    from llmbatch.operators.llm import LLMOperator

_SHARD = "_llmbatch_shard"  # column
_CALLS = 3  # of an actor at once: one whose last answers end, one that runs, one that is made ready
_OUTLINED = 8192  # rows at once


def map_dataset(
    ds: ray.data.Dataset,
    op: LLMOperator,
    *,
    concurrency: int | tuple[int, int] | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: float | None = None,
    resources: dict[str, float] | None = None,
    rows_per_shard: int = ROWS_PER_SHARD,
    plan: PlanName = "given",
    quiet: bool = False,
) -> ray.data.Dataset:
    """Answer every row of a Ray dataset, on several actors; rows keep their columns and get those of the answers.

    `op` is `LLMOperator(...)`. `concurrency` is the number of actors, or the fewest and the most of a pool that
    grows and shrinks. Where it is left out, as many run as the cluster has room for: one for each GPU, or for so many
    as share the model, or else few with most of a node's cores each. `num_cpus`, `num_gpus`, `memory` and `resources`
    are what each reserves on its node.
    The dataset's prompts are read at once, and the whole of it when the returned dataset is executed. Its rows come in
    no particular order, each of them once. A shard has about `rows_per_shard` rows at most: what Ray Data's checkpoints
    take at once. With `plan="auto"` a search decides how many of the cluster's GPUs share a copy, and says so on
    standard error (docs/gpu.md). Progress is written by an actor beside the driver, whose output Ray shows there. Both
    are silent with `quiet`. Raises `InputError`.

        answer = LLMOperator(model="Qwen/Qwen3-8B", prompt="question", chat=True, max_tokens=256)
        ds = map_dataset(ds, answer)
        ds.write_parquet("answers")
    """
    if not isinstance(ds, ray.data.Dataset):
        raise ParameterError(
            f"ds must be a Ray dataset, got {_kind(ds)}: "
            "ray.data.from_arrow(table) or ray.data.read_parquet(path) makes one, and the operator comes after it"
        )
    options = _options_of(op)
    rows_per_shard, quiet = whole("rows_per_shard", rows_per_shard, 1), flag("quiet", quiet)
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus), ("memory", memory)):
        if value is not None and finite(name, value) < 0:
            raise ParameterError(f"{name} must be at least 0, got {value}")
    check_resources(resources)
    one_of("plan", plan, PLANS)
    if plan == "auto":
        options = _planned(ds, options, concurrency, num_gpus, quiet=quiet)
    pool = actor_pool(options, concurrency, num_cpus=num_cpus, num_gpus=num_gpus, quiet=quiet)
    given = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "memory": memory, "resources": resources}
    worker = _planner(options)
    schema = _checked(ds, worker)
    outlines = _outlines(ds, options)
    if not outlines.num_rows:
        return ray.data.from_arrow(worker.answer_schema(schema).of_table(schema).empty_table())
    shards = cut(outlines, worker.cost, worker.pool, worker.scheduling, actors=pool.most, rows_per_shard=rows_per_shard)
    ledger = start_ledger(outlines.num_rows, quiet)
    assigned = _map(
        ds, _assign, fn_kwargs={"options": options, "shards": ray.put(shards)}, udf_modifying_row_count=False
    )
    packed = _map(assigned.sort(_SHARD, boundaries=list(range(1, shards.count))), _pack)
    return _map(
        packed,
        _Actor,
        fn_constructor_kwargs={
            "options": options,
            "ledger": ledger,
            "host_dtype": cast(DType, worker.dtype),
            "most": pool.most,
        },
        batch_size=1,
        compute=_strategy(pool.fewest, pool.most),
        **{name: value for name, value in given.items() if value is not None},
    )


map_dataset.__module__ = "llmbatch"  # which it is imported from


def _map(ds: Any, function: Any, *, batch_size: int | None = None, **options: Any) -> ray.data.Dataset:
    mapped: ray.data.Dataset = ds.map_batches(
        function, batch_size=batch_size, batch_format="pyarrow", zero_copy_batch=True, **options
    )
    return mapped


def _strategy(fewest: int, most: int) -> ray.data.ActorPoolStrategy:
    return ray.data.ActorPoolStrategy(
        min_size=fewest,
        max_size=most,
        # A pool that may grow does so where more calls wait; a shard that waits for one actor is lost to the others.
        max_tasks_in_flight_per_actor=_CALLS if fewest == most else 2 * _CALLS,
        max_concurrent_calls_per_actor=_CALLS,
        enable_true_multi_threading=True,
    )


def _kind(value: object) -> str:
    """Name what is no dataset or no operator, in few words: tables and datasets would show all of themselves."""
    return repr(value) if isinstance(value, type) else type(value).__name__


def _options_of(op: object) -> Options:
    """Return the options of an operator whose actors have engines. Raises ParameterError."""
    options = getattr(op, "options", None)
    if not isinstance(options, Options):
        raise ParameterError(f"map_dataset takes LLMOperator(...), got {_kind(op)}")
    if options.beside:
        raise ParameterError(
            f"beside must be left out of an operator for map_dataset, whose actors have engines, got {options.beside}: "
            "ds.map_batches(op, concurrency=1) asks an endpoint",
            option="beside",
            value=options.beside,
        )
    return options


def _checked(ds: ray.data.Dataset, worker: Worker) -> pa.Schema:
    """Return the dataset's schema. Raises DataError where its rows cannot be answered."""
    schema = ds.schema()
    if schema is not None and isinstance(schema.base_schema, pa.Schema):
        known = schema.base_schema
    else:  # of pandas blocks, for example
        first = ray.get(ds.limit(1).to_arrow_refs())
        known = first[0].schema if first else pa.schema([])
    worker.check(known)
    if _SHARD in known.names:
        raise DataError(f"the dataset has a column {_SHARD!r}, which map_dataset needs: rename it")
    for field in known:
        _check_sorted(field)
    return known


def _check_sorted(field: pa.Field) -> None:
    """Raise DataError where Ray's sort would end in a traceback, after the model was loaded: Arrow takes no rows."""
    try:
        pa.nulls(1, field.type).take(pa.array([0]))
    except pa.ArrowNotImplementedError:
        raise DataError(
            f"columns must be of types that Arrow can sort along, got {field.name!r} of {field.type}: cast it first, "
            "as in ds.map_batches(lambda table: table.cast(schema), batch_format='pyarrow')"
        ) from None


def _planned(ds: ray.data.Dataset, options: Options, concurrency: Any, num_gpus: Any, *, quiet: bool) -> Options:
    """Return the options with the best split of the cluster's GPUs, and say which one it is. Raises InputError."""
    if num_gpus is not None:
        raise refusal("num_gpus", "be left out where plan is auto, which decides it", num_gpus)
    check_undecided(options)
    outliner = _worker(outliner_options(options))
    _checked(ds, outliner)
    planned, note = on_planned_devices(ds, options, outliner, concurrency)
    if not quiet:
        sys.stderr.write(f"map_dataset: {note}\n")
    return planned


def _outlines(ds: ray.data.Dataset, options: Options) -> pa.Table:
    """Compute the outlines of all rows, read now."""
    columns = columns_read(options)
    needed = ds.select_columns(columns) if columns else ds
    outlined = _map(needed, _outline, fn_kwargs={"options": options}, batch_size=_OUTLINED)
    # Nothing is called for blocks without rows, and they stay without the columns.
    tables = [table for table in ray.get(outlined.to_arrow_refs()) if table.num_rows]
    return pa.concat_tables([OUTLINE.empty_table(), *tables])


def _outline(table: pa.Table, *, options: Options) -> pa.Table:
    return outline(_worker(outliner_options(options)).shard(table), _prompt_hashes(table, options))


def _planner(options: Options) -> Worker:
    """Return the worker that plans in this process."""
    return _worker(planner_options(options))


def _worker(options: Options) -> Worker:
    worker = worker_of(options).worker
    assert isinstance(worker, Worker), "options of an endpoint are refused"
    return worker


def _prompt_hashes(table: pa.Table, options: Options) -> NDArray[np.uint64]:
    """Compute the hash of what decides each row's answer."""
    return hash_rows(table.select(columns_read(options)))


def _assign(table: pa.Table, *, options: Options, shards: Any) -> pa.Table:
    """Return the table with the number of each row's shard."""
    found: Shards = ray.get(shards)
    contents = hash_rows(table) if found.spread else None
    return table.append_column(_SHARD, pa.array(found.of(_prompt_hashes(table, options), contents)))


def _pack(table: pa.Table) -> pa.Table:
    """Return the table as one row."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.table({"rows": pa.array([memoryview(sink.getvalue())], pa.large_binary())})


class _Actor:
    """What Ray Data constructs in each actor, and calls with one shard at a time in each of a few threads."""

    def __init__(self, options: Options, ledger: Any, host_dtype: DType, most: int) -> None:
        """Take an operator's options; `host_dtype` is the dtype of actors on processors, measured once for all.

        The job has `most` actors at most.
        """
        context: Any = ray.get_runtime_context()
        take_at_most(memory_of_actor(resources_of(context.get_node_id()), context.get_assigned_resources(), most))
        if options.engine == "torch" and options.dtype == "auto":
            from llmbatch.engine.devices import find_platform

            if find_platform(options.device).is_host:
                options = replace(options, dtype=host_dtype)
        self._options = options
        self._reports = LedgerReports(ledger)
        actor = str(context.get_actor_id())
        file = Path(tempfile.gettempdir()) / f"llmbatch-flight-{actor}-{os.getpid()}"
        self._flight = InFlightRows(file)
        process, place = f"{actor}-{os.getpid()}", Place.here()
        loans = LoanClient(
            LedgerBeats(ledger), self._flight, columns_read(options), actor=actor, process=process, place=place
        )
        self._engine = SharedEngine(Worker.open(options), loans)
        weakref.finalize(self, self._engine.close)
        # Called first, since closing waits for a step, and Ray may kill what waits: this process ends of itself.
        weakref.finalize(self, file.unlink, missing_ok=True)
        before = ray.get(ledger.settle.remote(actor, ActorHome(context.get_node_id(), str(file))))
        lost = None if before is None else _lost(before)
        if lost is not None:
            ray.get(ledger.died.remote(lost))

    def __call__(self, batch: pa.Table) -> pa.Table:
        table = pa.ipc.open_stream(batch["rows"][0].as_buffer()).read_all()
        numbers, table = table[_SHARD].to_numpy(), table.drop_columns([_SHARD])
        hashes = _prompt_hashes(table, self._options)
        # A shard may come in several parts, which may have equal prompts: they are known by all that their rows hold.
        content = np.concatenate((numbers[:1].astype(np.uint64), np.sort(hash_rows(table))))
        shard = int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=8).digest(), "little")
        schema = AnswerSchema.of(self._options, table.schema)
        call = ShardCall(shard, table, hashes, self._reports.begin(shard), self._flight, schema)
        return self._engine.answer(call, self._reports)


def _lost(home: ActorHome) -> NDArray[np.void] | None:
    """Find the rows that a process had in flight; None if it did not die of them: it ended, or its node did."""
    there = NodeAffinitySchedulingStrategy(home.node, soft=False)
    try:
        rows: NDArray[np.void] | None = ray.get(_read_flight.options(scheduling_strategy=there).remote(home.file))
    except ray.exceptions.TaskUnschedulableError:
        return None
    return rows


@ray.remote(num_cpus=0)
def _read_flight(file: str) -> NDArray[np.void] | None:
    if not os.path.exists(file):
        return None
    rows = left_behind(Path(file))
    os.unlink(file)
    return rows
