"""`run --plan auto`: how many of this process's GPUs share the model, by a search with a sample of the job's rows."""

from __future__ import annotations

from dataclasses import replace

from llmbatch.inference.options import Options
from llmbatch.inference.planners import check_undecided, outliner_options
from llmbatch.inference.worker import Worker
from llmbatch.io.reading.dataset import Dataset
from llmbatch.jobs.forecast import spread_rows
from llmbatch.perf_model.hardware import Hardware, measure_cpu, recognise
from llmbatch.perf_model.shares import fitting_ranks
from llmbatch.simulation.job_split import MOST_PLANNED, take_best_split
from llmbatch.simulation.splits import Offer
from llmbatch.system.memory import available_memory


def on_planned_devices(options: Options, source: Dataset) -> Options:
    """Return the options with the best split of the GPUs that are here, and a note that says which one it is.

    A job runs one copy of its model. Raises InputError where the rows cannot be answered, or no split holds the model.
    """
    check_undecided(options)
    from llmbatch.engine.devices import gpus_alike

    names = gpus_alike(options.device)
    if not names:
        return _noted(options, "the plan is one process on the processor, since there is no GPU to plan for")
    worker = Worker.open(outliner_options(options))
    worker.check(source.schema)
    rows = source.num_rows
    table = source.read() if rows <= MOST_PLANNED else spread_rows(source, MOST_PLANNED)
    requests = worker.shard(table).requests
    if not len(requests):
        return _noted(options, "there is nothing to plan for, since no row that was read can be answered")
    sharing = tuple(ranks for ranks in fitting_ranks(worker.model.config) if ranks <= len(names))
    offer = Offer(_gpu(names[0], options), len(names), groups=sharing, most_copies=1)
    times = rows / table.num_rows
    cpu = measure_cpu()
    host = Hardware(name="host", memory=available_memory(), bandwidth=cpu.bytes_per_second, compute=cpu.flops)
    return _noted(*take_best_split(options, worker.model, requests, offer, worker.scheduling, host=host, times=times))


def _gpu(name: str, options: Options) -> Hardware:
    """Return what a GPU does, by its maker's data sheet; one that has none here is measured."""
    known = recognise(name)
    if known is not None:
        return known
    import torch

    from llmbatch.engine.calibration.microbenchmarks import measure_device

    device = torch.device("cuda" if options.device == "auto" else options.device)
    return measure_device(device, torch.float32 if options.dtype == "float32" else torch.bfloat16)


def _noted(options: Options, note: str) -> Options:
    return replace(options, notes=(*options.notes, note))
