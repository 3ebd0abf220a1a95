"""What `llmbatch simulate --online` runs: online requests by the clock, a job beside them, a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import pyarrow as pa

from llmbatch.arguments import Paths, check_names, path, paths_of, refusal
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.planning.workload import Pool
from llmbatch.simulation.experiment import read_shape
from llmbatch.simulation.online.bound import Bound, RequestWork
from llmbatch.simulation.online.figures import OnlineReport, job_figures, online_figures
from llmbatch.simulation.online.inputs import Arriving, job_of, online_requests
from llmbatch.simulation.online.options import OF_JOB, OnlineArgs, OnlineOptions
from llmbatch.simulation.online.policies import RunLog, run_policy
from llmbatch.simulation.online.tables import steps_table
from llmbatch.simulation.simulator import pool_of
from llmbatch.simulation.table_files import TableFiles


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """A report, and the tables from which each of its figures can be computed again."""

    report: OnlineReport
    steps: pa.Table
    requests: pa.Table


@dataclass(frozen=True, kw_only=True)
class OnlineExperiment(OnlineOptions):
    """A run before it begins. Raises InputError where the traces or an option are wrong.

    OnlineExperiment(online="conv.parquet", offline=["ooco-offline"], requests=9_000, policy="priority").run()
    """

    online: str
    offline: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in OF_JOB:
            if getattr(self, name) is not None and not self.offline:
                raise refusal(name, "come with a job, which it is of (--offline)", getattr(self, name))

    @cached_property
    def cost(self) -> CostModel:
        """The model on the device, under the law."""
        hardware = find_hardware(self.hardware).group(self.tensor_parallel)
        return CostModel(read_shape(self.model_shape), hardware, law=self.law, overlap=Overlap(self.overlap_exponent))

    @cached_property
    def pool(self) -> Pool:
        """The pages for KV."""
        return pool_of(self.cost, self.kv_memory, self.page_size)

    @cached_property
    def guests(self) -> Arriving:
        """The online requests."""
        return online_requests(self.online, self)

    @cached_property
    def job(self) -> Arriving:
        """The rows of the job, in the order of their input."""
        return job_of(self.offline, self, self.cost)

    def run(self) -> OnlineRun:
        """Run the policy by the clock."""
        pool, begun = self.pool, time.perf_counter()
        guests, job = self.guests.that_fit(pool.tokens), self.job.that_fit(pool.tokens)
        refused = len(self.guests) + len(self.job) - len(guests) - len(job)
        done = run_policy(self, guests, job, pool, self.cost)
        steps, requests = steps_table(done.steps), done.requests.table()
        one = len(job) > 0 and self.pools is None  # the bound is that of one engine
        bound = bound_of(self, guests, job, self.cost) if one else None
        report = OnlineReport(
            policy=self.policy,
            ttft=self.ttft,
            tpot=self.tpot,
            online=online_figures(requests, self.ttft, self.tpot),
            job=job_figures(steps, requests, self.duration),
            refused=refused,
            **_totals(done),
            bound_seconds=bound.end() if bound and self.duration is None else None,
            bound_share=bound.share(self.duration) if bound and self.duration is not None else None,
            predictor_error=done.predictor_error,
            took=time.perf_counter() - begun,
        )
        return OnlineRun(report, steps, requests)


def bound_of(options: OnlineOptions, guests: Arriving, job: Arriving, cost: CostModel) -> Bound:
    """Return the bound of steps of at most the TPOT target."""
    online, offline = (RequestWork.of(cost, each.prompt, each.output, each.found) for each in (guests, job))
    return Bound(cost, guests.arrival, online, offline, options.tpot)


def _totals(done: RunLog) -> dict[str, Any]:
    log = done.steps
    return {
        "steps": len(log),
        "preemptions": int(log["preempted"].sum()),
        "yielded_pages": int(log["yielded_pages"].sum()),
        "run_seconds": float(log["begin_s"][-1] + log["time_s"][-1]) if len(log) else 0.0,
    }


def simulate_online(online: str, **options: Unpack[OnlineArgs]) -> OnlineReport:
    """Run online requests beside a job against a clock, under a policy of your choice.

    `online` is a Parquet file of requests, or a distribution of lengths (docs/simulate.md). `steps_out` and
    `requests_out` name Parquet files that get a row a step and a row a request.

    Raises `InputError` where a trace or an option is wrong.

        report = simulate_online("conv.parquet", offline=["ooco-offline"], requests=9_000, policy="priority")
    """
    check_names(options, OnlineArgs.__annotations__)
    rest: dict[str, Any] = {**options}
    job: Paths | None = rest.pop("offline", None)
    offline = [] if job is None else paths_of(job, name="offline")
    files = TableFiles.take(rest, [path("online", online), *offline])
    done = OnlineExperiment(online=path("online", online), offline=offline, **rest).run()
    files.write({"steps_out": lambda: done.steps, "requests_out": lambda: done.requests})
    return done.report
