"""The policies by name: each runs requests to the end of a run, and gives the same log."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.compilation.records import Records, records
from llmbatch.engine.simulated import Clock
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.simulation.online.inputs import Arriving
from llmbatch.simulation.online.options import OnlineOptions, OnlinePolicy
from llmbatch.simulation.online.papers import bros, fcfs, ooco, priority, round_robin
from llmbatch.simulation.online.papers.clock import Decide, run_clock
from llmbatch.simulation.online.papers.pools import Pools
from llmbatch.simulation.online.papers.roofline import fitted
from llmbatch.simulation.online.papers.run_state import ONLINE, RunRules, RunState, TimedRequest
from llmbatch.simulation.online.slack import GuestLoop, run_guests
from llmbatch.simulation.online.tables import RequestTimes
from llmbatch.simulation.simulator import MAX_RUNNING, describe
from llmbatch.simulation.traces import join


@dataclass(frozen=True, slots=True)
class RunLog:
    """What happened in a run, step by step and request by request."""

    steps: NDArray[np.void]  # of TIMED_STEP
    requests: RequestTimes
    predictor_error: float | None = None  # `ooco`: relative, of its roofline after fitting


@dataclass(frozen=True, slots=True)
class ReadyPolicy:
    """A policy of a paper: how it decides, in how many lanes, and how far its predictions are off."""

    decide: Decide
    lanes: int = 2
    predictor_error: float | None = None


def run_policy(options: OnlineOptions, guests: Arriving, job: Arriving, pool: Pool, cost: CostModel) -> RunLog:
    """Run online requests and a job, all of which fit the pool alone, under the policy that is asked for."""
    until = np.inf if options.duration is None else options.duration
    if options.policy == "slack":
        return _run_slack(options, guests, job, pool, cost, until)
    policy = find_policy(options.policy, cost)
    state = RunState.of(_rows(guests, job, policy), Clock.of(cost), rules_of(options, job, pool))
    if options.pools is None:
        log = run_clock(state, policy.decide, until=until)
        state.check()
    else:
        pools = Pools(state, fitted(cost).roofline, cost.shape.layers)
        log = pools.run(until)
        pools.check()
    rows = state.rows
    columns = {name: np.asarray(rows[name]) for name in ("online", "arrival", "admitted", "first", "last")}
    columns |= {name: np.asarray(rows[name]) for name in ("prompt", "output", "found", "recomputed", "preemptions")}
    times = RequestTimes(**columns, generated=np.asarray(rows["known"] - rows["prompt"]), times=state.times)
    return RunLog(log, times, policy.predictor_error)


def find_policy(name: OnlinePolicy, cost: CostModel) -> ReadyPolicy:
    """Make a paper's policy ready for a model on a device. Raises ParameterError."""
    if name == "ooco":
        fit, batch = fitted(cost), records(ooco.MixedBatch)

        def decide(state: RunState) -> None:
            call(ooco.decide, state, fit.roofline, batch)

        return ReadyPolicy(decide, predictor_error=fit.error)
    known = {
        "fcfs": ReadyPolicy(fcfs.decide, lanes=1),
        "round-robin": ReadyPolicy(round_robin.decide),
        "priority": ReadyPolicy(priority.decide),
        "bros": ReadyPolicy(bros.decide),
    }
    return known[name]


def rules_of(options: OnlineOptions, job: Arriving, pool: Pool) -> RunRules:
    """Return what a paper's policy is told."""
    return RunRules(
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        step_tokens=options.step_tokens,
        most_running=options.max_running,
        outstanding=max(1, len(job)) if options.outstanding is None else options.outstanding,
        closed=options.outstanding is not None,
        ttft=options.ttft,
        tpot=options.tpot,
        expected=float(job.output.mean()) if len(job) else 0.0,
    )


def _rows(guests: Arriving, job: Arriving, policy: ReadyPolicy) -> Records[TimedRequest]:
    rows = records(TimedRequest, len(guests) + len(job))
    online = np.arange(len(rows)) < len(guests)
    for name in ("arrival", "prompt", "output", "found"):
        rows[name][:] = np.concatenate((getattr(guests, name), getattr(job, name)))
    rows["online"][:] = online
    rows["lane"][:] = ONLINE * online if policy.lanes == 2 else 0
    return rows


def _run_slack(
    options: OnlineOptions, guests: Arriving, job: Arriving, pool: Pool, cost: CostModel, until: float
) -> RunLog:
    together = join([job.trace, guests.trace])
    workload = describe(together, pool, options.lengths)
    of_job = np.arange(len(together)) < len(job)
    loop = GuestLoop(
        together.output_lengths, together.prompt_lengths, guests.arrival, cost, ttft=options.ttft, until=until
    )
    scheduling = Scheduling(max_running=MAX_RUNNING, seed=options.seed)
    workload = replace(workload, tree=workload.tree.select(of_job))
    run_guests(workload, loop, pool, cost, scheduling, tpot=options.tpot)
    log = loop.log
    times = RequestTimes(
        online=~of_job,
        arrival=np.concatenate((job.arrival, guests.arrival)),
        admitted=log.admitted,
        first=log.first,
        last=log.last,
        prompt=together.prompt_lengths,
        output=together.output_lengths,
        found=log.found,
        generated=log.generated,
        recomputed=log.recomputed.astype(np.int64),
        preemptions=log.preemptions,
        times=log.times,
    )
    return RunLog(log.steps[: log.counts[0].steps], times)
