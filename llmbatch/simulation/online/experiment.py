"""What `llmbatch simulate --online` runs: online requests by the clock, a job beside them, a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmbatch.arguments import Paths, check_names, path, paths_of
from llmbatch.compilation.records import Records, records
from llmbatch.engine.simulated import Clock
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.planning.workload import Pool
from llmbatch.simulation.experiment import output_file, read_shape
from llmbatch.simulation.mixes import draw_mix, known_before, parse_mix
from llmbatch.simulation.online.arrivals import drawn, read_arrivals, scaled, uniform
from llmbatch.simulation.online.bound import Bound, RequestWork
from llmbatch.simulation.online.clock import run_clock
from llmbatch.simulation.online.figures import OnlineReport, job_figures, online_figures
from llmbatch.simulation.online.lengths import drawn_trace, is_drawn
from llmbatch.simulation.online.options import OnlineArgs, OnlineOptions
from llmbatch.simulation.online.policies import ReadyPolicy, find_policy
from llmbatch.simulation.online.run_state import ONLINE, RunRules, RunState, TimedRequest
from llmbatch.simulation.options import MIX_REQUESTS
from llmbatch.simulation.simulator import pool_of
from llmbatch.simulation.traces import Trace, put_together, read_traces


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """A report, and the tables from which each of its figures can be computed again."""

    report: OnlineReport
    steps: pa.Table
    requests: pa.Table


@dataclass(frozen=True, slots=True)
class Arriving:
    """Requests and when they arrive, ascending: columns of one length."""

    arrival: NDArray[np.float64]  # s
    prompt: NDArray[np.int32]  # tokens
    output: NDArray[np.int32]
    found: NDArray[np.int32]  # prompt tokens that an earlier one computes

    def where(self, keep: NDArray[np.bool_]) -> Arriving:
        """Select requests."""
        return Arriving(self.arrival[keep], self.prompt[keep], self.output[keep], self.found[keep])


@dataclass(frozen=True, kw_only=True)
class OnlineExperiment(OnlineOptions):
    """A run before it begins. Raises InputError where the traces or an option are wrong.

    OnlineExperiment(online="conv.parquet", offline=["ooco-offline"], requests=9_000, policy="priority").run()
    """

    online: str
    offline: Sequence[str] = ()

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
        rng = np.random.default_rng((self.seed, 0))
        if self.arrivals == "trace":
            if is_drawn(self.online):
                raise ParameterError(
                    f"arrivals (--arrivals) must be poisson or gamma for {self.online}, which has no times"
                )
            trace = put_together(read_traces([self.online], hash_block=self.hash_block))
            rows, arrival = scaled(read_arrivals(Path(self.online)), self.rate, rng)
            if self.duration is not None:
                rows, arrival = rows[arrival < self.duration], arrival[arrival < self.duration]
        else:
            assert self.per_second is not None, "options are checked"
            assert self.duration is not None, "options are checked"
            variation = 1.0 if self.arrivals == "poisson" else self.burstiness
            arrival = drawn(self.per_second * self.rate, self.duration, rng, variation=variation)
            trace = self._lengths(self.online, len(arrival), rng)
            rows = rng.integers(0, len(trace), len(arrival))
        return Arriving(arrival, trace.prompt_lengths[rows], trace.output_lengths[rows], np.zeros(len(rows), np.int32))

    def _lengths(self, name: str, count: int, rng: np.random.Generator) -> Trace:
        if is_drawn(name):
            return drawn_trace(name, max(count, 1), rng)
        return put_together(read_traces([name], hash_block=self.hash_block))

    @cached_property
    def job(self) -> Arriving:
        """The rows of the job, in the order of their input."""
        trace = self._job_trace()
        if trace is None:
            none = np.empty(0, np.int32)
            return Arriving(np.empty(0), none, none, none)
        tree = trace.tree()
        found = known_before(tree.rows, tree.lcp, np.arange(len(trace), dtype=np.int32))
        found = np.minimum(found, trace.prompt_lengths - 1)  # its last token is computed by each
        arrival = np.zeros(len(trace)) if self.offline_rate is None else uniform(self.offline_rate, len(trace))
        return Arriving(arrival, trace.prompt_lengths, trace.output_lengths, found)

    def _job_trace(self) -> Trace | None:
        if not self.offline:
            return None
        distributions = [name for name in self.offline if is_drawn(name)]
        if distributions:
            if len(self.offline) > 1 or self.requests is None or self.mix is not None:
                raise ParameterError(
                    f"a distribution must stand alone and have requests (--requests N), got {', '.join(self.offline)}"
                )
            return drawn_trace(distributions[0], self.requests, np.random.default_rng((self.seed, 1)))
        traces = read_traces(self.offline, hash_block=self.hash_block)
        if self.mix is not None:
            return draw_mix(traces, parse_mix(self.mix), self.requests or MIX_REQUESTS, self.cost, self.seed).trace
        together = put_together(traces)
        return together if self.requests is None else together.first(self.requests)

    def run(self) -> OnlineRun:
        """Run the policy by the clock."""
        pool, begun = self.pool, time.perf_counter()
        capacity = pool.whole_tokens // self.page_size * self.page_size
        guests, job = self.guests, self.job
        fits = [each.prompt.astype(np.int64) + each.output <= capacity for each in (guests, job)]
        guests, job = guests.where(fits[0]), job.where(fits[1])
        policy = find_policy(self.policy, self.cost)
        state = RunState.of(self._rows(guests, job, policy), Clock.of(self.cost), self._rules(job, capacity))
        log = run_clock(state, policy.decide, until=np.inf if self.duration is None else self.duration)
        state.check()
        steps = pa.table({name: log[name] for name in log.dtype.names or ()})
        requests = requests_table(state)
        work = [RequestWork.of(self.cost, each.prompt, each.output, each.found) for each in (guests, job)]
        bound = Bound(self.cost, guests.arrival, work[0], work[1], self.tpot)
        return OnlineRun(
            OnlineReport(
                policy=self.policy,
                ttft=self.ttft,
                tpot=self.tpot,
                online=online_figures(requests, self.ttft, self.tpot),
                job=job_figures(steps, requests, self.duration),
                refused=int((~fits[0]).sum() + (~fits[1]).sum()),
                steps=len(log),
                preemptions=int(log["preempted"].sum()),
                yielded_pages=int(log["yielded_pages"].sum()),
                run_seconds=float(state.totals[0].now),
                bound_seconds=bound.end() if len(job.arrival) and self.duration is None else None,
                bound_share=bound.share(self.duration) if len(job.arrival) and self.duration is not None else None,
                predictor_error=policy.predictor_error,
                took=time.perf_counter() - begun,
            ),
            steps,
            requests,
        )

    def _rules(self, job: Arriving, capacity: int) -> RunRules:
        return RunRules(
            page_size=self.page_size,
            num_pages=capacity // self.page_size,
            step_tokens=self.step_tokens,
            most_running=self.max_running,
            outstanding=max(1, len(job.arrival)) if self.outstanding is None else self.outstanding,
            closed=self.outstanding is not None,
            ttft=self.ttft,
            tpot=self.tpot,
            expected=float(job.output.mean()) if len(job.output) else 0.0,
        )

    def _rows(self, guests: Arriving, job: Arriving, policy: ReadyPolicy) -> Records[TimedRequest]:
        rows = records(TimedRequest, len(guests.arrival) + len(job.arrival))
        online = np.arange(len(rows)) < len(guests.arrival)
        for name in ("arrival", "prompt", "output", "found"):
            rows[name][:] = np.concatenate((getattr(guests, name), getattr(job, name)))
        rows["online"][:] = online
        rows["lane"][:] = ONLINE * online if policy.lanes == 2 else 0
        return rows


def requests_table(state: RunState) -> pa.Table:
    """Return a row a request: the online ones first, each kind in order of arrival."""
    rows = state.rows
    online, output = rows["online"], rows["output"].astype(np.int64)
    gaps = np.diff(state.times, prepend=0.0)
    inner = np.ones(len(gaps), np.bool_)
    inner[rows["times"][online]] = False  # a request's first token ends no gap
    offsets = np.concatenate(([0], np.cumsum(np.where(online, output - 1, 0)))).astype(np.int64)
    columns: dict[str, Any] = {
        "row": np.arange(len(rows)),
        "kind": np.where(online, "online", "offline"),
        "arrival_s": rows["arrival"],
        "admitted_s": rows["admitted"],
        "first_token_s": rows["first"],
        "last_token_s": rows["last"],
        "prompt_tokens": rows["prompt"],
        "output_tokens": rows["output"],
        "found_tokens": rows["found"],
        "generated_tokens": rows["known"] - rows["prompt"],
        "recomputed_tokens": rows["recomputed"],
        "preemptions": rows["preemptions"],
        "gaps_s": pa.LargeListArray.from_arrays(offsets, gaps[inner]),
    }
    return pa.table(columns)


def simulate_online(online: str, **options: Unpack[OnlineArgs]) -> OnlineReport:
    """Run online requests beside a job against a clock, under a policy of your choice.

    `online` is a Parquet file of requests, or a distribution of lengths (docs/simulate.md). `steps_out` and
    `requests_out` name Parquet files that get a row a step and a row a request.

    Raises `InputError` where a trace or an option is wrong.

        report = simulate_online("conv.parquet", offline=["ooco-offline"], requests=9_000, policy="priority")
    """
    check_names(options, OnlineArgs.__annotations__)
    rest: dict[str, Any] = {**options}
    outputs = {name: rest.pop(name, None) for name in ("steps_out", "requests_out")}
    files = {name: output_file(name, value) for name, value in outputs.items() if value is not None}
    job: Paths | None = rest.pop("offline", None)
    offline = [] if job is None else paths_of(job, name="offline")
    done = OnlineExperiment(online=path("online", online), offline=offline, **rest).run()
    tables = {"steps_out": done.steps, "requests_out": done.requests}
    for name, file in files.items():
        pq.write_table(tables[name], file)
    return done.report
