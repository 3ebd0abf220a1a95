"""What `llmbatch simulate` is asked: traces, a mix, a model on a device, a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from llmbatch.arguments import Paths, check_names, paths_of, refusal
from llmbatch.errors import ModelError
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import SHAPES, ModelShape, find_shape
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.simulation.mix_draws import draw_mix
from llmbatch.simulation.mixes import parse_mix
from llmbatch.simulation.options import MIX_REQUESTS, SimulationArgs, SimulationOptions
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, Simulation, SimulationReport, pool_of
from llmbatch.simulation.table_files import TableFiles
from llmbatch.simulation.traces import Trace, put_together, read_traces


@dataclass(frozen=True, kw_only=True)
class Experiment(SimulationOptions):
    """A simulation before it runs. Raises InputError where the traces or an option are wrong.

    Experiment(traces=["code.parquet", "exam.parquet", "video.parquet"], mix="table2-1", requests=20_000).run()
    """

    traces: Sequence[str]

    @cached_property
    def cost(self) -> CostModel:
        """The model on the device, under the law."""
        hardware = find_hardware(self.hardware).group(self.tensor_parallel)
        overlap = Overlap(self.overlap_exponent)
        return CostModel(read_shape(self.model_shape), hardware, law=self.law, overlap=overlap, cascade=self.cascade)

    @cached_property
    def pool(self) -> Pool:
        """The pages for KV."""
        return pool_of(self.cost, self.kv_memory, self.page_size)

    @cached_property
    def scheduling(self) -> Scheduling:
        """The policy."""
        return Scheduling(
            order=self.order,
            step_tokens=self.step_tokens,
            max_running=MAX_RUNNING,
            seed=self.seed,
            sample_fraction=self.sample_fraction,
        )

    @cached_property
    def trace(self) -> Trace:
        """The requests, in input order."""
        files = read_traces(self.traces, hash_block=self.hash_block)
        if self.max_tokens is not None:
            files = [file.with_answers_cut(self.max_tokens) for file in files]
        if self.mix is not None:
            return draw_mix(files, parse_mix(self.mix), self.requests or MIX_REQUESTS, self.cost, self.seed).trace
        together = put_together(files)
        return together if self.requests is None else together.first(self.requests)

    def run(self) -> Simulation:
        """Simulate."""
        cost, pool, scheduling = self.cost, self.pool, self.scheduling  # what is wrong is said before traces are read
        if self.mix is not None:
            parse_mix(self.mix)
        trace = self.trace
        if self.data_parallel > len(trace):
            raise refusal("data_parallel", f"be at most the {len(trace):,} requests", self.data_parallel)
        return simulate_trace(
            trace,
            cost,
            pool,
            scheduling,
            lengths=self.lengths,
            max_tokens=self.max_tokens,
            replicas=self.data_parallel,
        )


def simulate(traces: Paths, **options: Unpack[SimulationArgs]) -> SimulationReport:
    """Run request traces through planner and scheduler against a clock, on a model and a GPU of your choice.

    `traces` are Parquet files of requests (docs/simulate.md). With `mix`, `requests` are drawn of three of them, by
    default 100,000. `steps_out` and `requests_out` name Parquet files that get a row a step and a row a request.

    Raises `InputError` where a trace or an option is wrong.

        report = simulate(["code.parquet", "exam.parquet", "video.parquet"], mix="table2-1", requests=20_000)
    """
    check_names(options, SimulationArgs.__annotations__)
    rest: dict[str, Any] = {**options}
    inputs = paths_of(traces, name="traces")
    files = TableFiles.take(rest, inputs)
    simulation = Experiment(traces=inputs, **rest).run()
    files.write({"steps_out": simulation.steps_table, "requests_out": simulation.requests_table})
    return simulation.report


simulate.__module__ = "llmbatch"  # which it is imported from


def read_shape(name: str) -> ModelShape:
    """Return the shape of that name, or of the transformers config in a folder, in 2-byte weights and KV.

    As in the named shapes, every token passes embedding and LM head. Raises InputError.
    """
    if name.lower() in SHAPES or not Path(name).exists():
        return find_shape(name)
    from transformers import AutoConfig

    try:
        shape = ModelShape.from_config(AutoConfig.from_pretrained(name, local_files_only=True), 2)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"model folder {name!r} has no config that can be read: {reason}") from error
    return replace(shape, params=shape.params + 2 * shape.head_params, head_params=0.0)
