"""What `llmbatch simulate` is asked: traces, a mix, a model on a device, a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llmbatch.errors import ModelError, ParameterError
from llmbatch.perf_model.cost import SHAPES, CostModel, Law, ModelShape, Overlap, find_shape
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.planning.order import Policy
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.simulation.mixes import draw_mix, parse_mix
from llmbatch.simulation.simulator import MAX_RUNNING, PAGE_SIZE, Knowledge, Simulation, pool_of, simulate
from llmbatch.simulation.traces import Trace, put_together, read_traces

_REQUESTS = 100_000  # of a mix


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A simulation before it runs. Raises InputError where the traces or an option are wrong.

    Experiment(traces=["code.parquet", "exam.parquet", "video.parquet"], mix="table2-1", requests=20_000).run()
    """

    traces: Sequence[str]
    mix: str | None = None
    requests: int | None = None
    max_tokens: int | None = None  # that users give: longer answers are cut; None: as far as pool and context reach
    order: Policy = "blend"
    step_tokens: int | None = None
    model_shape: str = "llama-3-8b"
    hardware: str = "a100-80gb"
    kv_memory: float | None = None  # bytes
    page_size: int = PAGE_SIZE
    hash_block: int = 16
    tensor_parallel: int = 1
    data_parallel: int = 1
    lengths: Knowledge = "sampled"
    sample_fraction: float = 0.01
    law: Law = "paper"
    overlap_exponent: float = 4.0
    cascade: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "max_tokens",
            "step_tokens",
            "page_size",
            "hash_block",
            "tensor_parallel",
            "data_parallel",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name} must be at least 1, got {value}")
        if self.seed < 0:
            raise ParameterError(f"seed must be at least 0, got {self.seed}")

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
            return draw_mix(files, parse_mix(self.mix), self.requests or _REQUESTS, self.cost, self.seed).trace
        together = put_together(files)
        return together if self.requests is None else together.first(self.requests)

    def run(self) -> Simulation:
        """Simulate."""
        _, pool = self.cost, self.pool  # what is wrong with these is said before traces are read
        return simulate(
            self.trace,
            self.cost,
            pool,
            self.scheduling,
            lengths=self.lengths,
            max_tokens=self.max_tokens,
            replicas=self.data_parallel,
        )


def read_shape(name: str) -> ModelShape:
    """The shape of that name, or of the transformers config in a folder, in 2-byte weights and KV.

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
