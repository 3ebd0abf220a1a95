"""Online requests beside a job, by the clock: the tables of docs/results/beside.md.

    python benchmarks/clock/beside.py TABLE [--small] [--exponents 1,2,4] [--jobs N] [--policies slack]

TABLE is one of

- `bros`: BROS's set-up (its 7.1): OPT-13B on two A100-40GB, ShareGPT-like requests, 256 best-effort rows outstanding;
  `slack` also with the steps that make a tenth of fcfs's latency.
- `overload`: the same past saturation.
- `memory`: Azure's conversations beside table2-3 in the pool of an A100-40GB: what is computed again.
- `grid`: three kinds of traffic by three jobs, each job as large as the bound ends at 2,400 s; other policies at eight
  fixed settings, and `slack` with steps as long as theirs get.
- `load`: OOCO's protocol (its 5.2) on the same nine: the most rows of the job that end in a second while at most 3 %
  of online requests are violated.
- `pools`: OOCO's two engines against two that are mixed, at twice the traffic and the job of the nine.

Each writes docs/results/beside-TABLE.json, one row a run, and then docs/results/beside.md from all that are there. A
run that was stopped goes on by the same command, from beside-TABLE-stopped.jsonl; after a change that file must go.
`--small` takes a tenth of the time, and its table says so. `--policies slack` runs that policy alone, and keeps the
rows of the others that are in the file; where one is not, the page is not written. Traces are read from the folder that
$LLMBATCH_TRACES names. Nothing was tuned to these tables but what the page names.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from harness.beside_rows import Rows, named
from harness.beside_tables import write_tables
from harness.simulations import RESULTS, SOURCES, path_of

from llmbatch.simulation.online.bound import steps_of_latency
from llmbatch.simulation.online.experiment import OnlineExperiment, OnlineRun, bound_of
from llmbatch.simulation.online.figures import online_figures
from llmbatch.simulation.online.options import OF_JOB, POOLS

TRAFFIC = (("conv", 0.5), ("conv", 0.8), ("code", 0.15))
JOBS = ("table2-1", "table2-3", "ooco-offline")
FIXED = tuple((step, running) for step in (256, 512, 1024, 2048) for running in (64, 256))
TPOT = 0.05  # s, of B's tables
LONG_TPOT = 0.2  # s, about the longest steps that the fixed settings get
PARTS = 16  # of the bound's rate, in which the most load held is sought
BROS: Mapping[str, Any] = {
    "online": "bros-sharegpt", "arrivals": "poisson", "offline": ("bros-be",), "requests": 20_000, "outstanding": 256,
    "model_shape": "opt-13b", "hardware": "a100-40gb", "tensor_parallel": 2, "ttft": 0.4, "tpot": 0.2,
}  # fmt: skip  # a table
WANTED = 0.1  # of fcfs's normalised latency
POOL_40GB = 40e9 - 4e9 - 16.06e9  # bytes that an A100-40GB has beside Llama-3-8B


@dataclass(frozen=True, slots=True)
class Size:
    """How long a table's runs are."""

    bros_seconds: float = 600.0
    job_seconds: float = 2400.0  # at which the bound ends a job of the grid
    load_seconds: float = 3600.0
    small: bool = False


WHOLE = Size()
SMALL = Size(60.0, 240.0, 360.0, True)


def run(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Run a setting: its figures, and those of online requests that arrived while the job ran."""
    return figures_of(setting, experiment_of(setting).run())


def experiment_of(setting: Mapping[str, Any]) -> OnlineExperiment:
    """Read a setting; `slack` has all rows of a job at once."""
    left_out = ("outstanding",) if setting["policy"] == "slack" else ()
    return OnlineExperiment(**{name: value for name, value in setting.items() if name not in left_out})


def figures_of(setting: Mapping[str, Any], done: OnlineRun) -> dict[str, Any]:
    """Return the figures of a run."""
    arrived = done.requests.filter(pc.equal(done.requests["kind"], "online"))
    job = done.report.job
    last = np.inf if not job.rows else job.seconds
    arrived = arrived.filter(pc.less_equal(arrived["arrival_s"], last))
    waits = arrived["first_token_s"].to_numpy() - arrived["arrival_s"].to_numpy()
    gaps = arrived["gaps_s"].combine_chunks().flatten().to_numpy()
    beside = {
        "requests": len(waits),
        "ttft_p99": float(np.percentile(waits, 99)) if len(waits) else None,
        "gap_p999": float(np.percentile(gaps, 99.9)) if len(gaps) else None,
    }
    return {"setting": named(setting), "figures": done.report.to_dict(), "while_job_ran": beside}


def run_bros(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Run a setting of BROS's: also the share of online requests that ended in time, and the rows that the pool allows.

    Its rows share nothing, so the pool bounds what a step reads. Without a job there are no such rows.
    """
    experiment, seconds = experiment_of(setting), setting["duration"]
    bound = bound_of(experiment, experiment.guests, experiment.job, experiment.cost)
    most = replace(bound, pool=float(experiment.pool.tokens)).share(seconds) * len(experiment.job)
    done = experiment.run()
    judged = online_figures(done.requests, BROS["ttft"], BROS["tpot"])  # also where steps are shorter
    done = replace(done, report=replace(done.report, online=judged))
    online = done.requests.filter(pc.equal(done.requests["kind"], "online"))
    served = float(np.mean(online["last_token_s"].to_numpy() <= seconds))
    return {**figures_of(setting, done), "served": served, "bound_rows": most}


def violations(setting: Mapping[str, Any], alone_p99: float) -> tuple[float, int]:
    """Run a setting: the share of online requests that are violated, and how many of the job's rows ended.

    A request is violated by a first token later than 1.15 times the p99 of traffic alone, or a mean gap above 1.1 S.
    """
    done = OnlineExperiment(**setting, ttft=1.15 * alone_p99).run()
    online = done.requests.filter(pc.equal(done.requests["kind"], "online"))
    first, last = online["first_token_s"].to_numpy(), online["last_token_s"].to_numpy()
    late = first - online["arrival_s"].to_numpy() > 1.15 * alone_p99
    gaps = (last - first) / np.maximum(online["output_tokens"].to_numpy() - 1, 1)
    return float(np.mean(late | (gaps > 1.1 * setting["tpot"]))), done.report.job.rows_ended


def cut_trace(source: str, seconds: float, folder: str) -> str:
    """Write the requests of a trace that arrive within so many seconds."""
    table = pq.read_table(path_of(source))
    path = Path(folder) / f"{source}-{seconds:g}.parquet"
    pq.write_table(table.filter(pc.less(table["arrival_s"], seconds)), path)
    return str(path)


def bros(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """A, S1 to S3."""
    rates = (2.5, 5.0, 7.5, 10.0)
    settings = [
        {**BROS, "per_second": rate, "duration": size.bros_seconds, "policy": policy, "overlap_exponent": exponent}
        for exponent in exponents
        for rate in rates
        for policy in ("fcfs", "round-robin", "bros", "slack")
    ]
    alone = [
        {**{name: value for name, value in setting.items() if name not in OF_JOB}, "offline": ()}
        for setting in settings
        if setting["policy"] == "slack"
    ]
    runs, short = rows.of(run_bros, settings), []
    for found in runs:
        if found["setting"]["policy"] == "fcfs":
            answers = experiment_of(found["setting"]).guests.output
            most = steps_of_latency(WANTED * found["figures"]["online"]["normalised_latency"], answers)
            short.append({**found["setting"], "policy": "slack", "tpot": most})
    return runs + rows.of(run_bros, alone) + rows.of(run_bros, short)


def overload(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """A, S4: rates past saturation, and those at which capacity is sought."""
    settings = [
        {**BROS, "per_second": float(rate), "duration": size.bros_seconds, "policy": policy,
         "overlap_exponent": exponent}
        for exponent in exponents
        for rate in (10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22)
        for policy in ("bros", "slack")
    ]  # fmt: skip  # arguments in groups
    return rows.of(run, settings)


def memory(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """A, S5."""
    settings = [
        {"online": path_of("azure2023_conv"), "rate": 0.8, "offline": [path_of(source) for source in SOURCES],
         "mix": "table2-3", "requests": 20_000, "kv_memory": POOL_40GB, "duration": size.load_seconds, "tpot": TPOT,
         "policy": policy, "overlap_exponent": exponent}
        for exponent in exponents
        for policy in ("priority", "bros", "ooco", "slack")
    ]  # fmt: skip  # arguments in groups
    return rows.of(run, settings)


def nine(exponent: float, traces: Mapping[str, str]) -> list[dict[str, Any]]:
    """The nine settings of B without a policy; jobs have as many rows as they may ever need."""
    settings: list[dict[str, Any]] = []
    for source, rate in TRAFFIC:
        for job in JOBS:
            setting = {"online": traces[source], "rate": rate, "tpot": TPOT, "overlap_exponent": exponent}
            if job in ("table2-1", "table2-3"):
                setting |= {"offline": [path_of(each) for each in SOURCES], "mix": job, "requests": 40_000}
            else:
                setting |= {"offline": [job], "requests": 40_000}
            settings.append({**setting, "named": f"{source} x {rate:g}, {job}"})
    return settings


def rows_at(setting: Mapping[str, Any], seconds: float) -> int:
    """Count the rows of a setting's job that the bound ends within so many seconds."""
    experiment = OnlineExperiment(**{name: value for name, value in setting.items() if name != "named"})
    return bound_of(experiment, experiment.guests, experiment.job, experiment.cost).rows(seconds)


def run_named(setting: dict[str, Any]) -> dict[str, Any]:
    """Run a setting that has a name."""
    return {"named": setting["named"], **run({key: value for key, value in setting.items() if key != "named"})}


def run_alone(setting: dict[str, Any]) -> dict[str, Any]:
    """Run online requests alone: also when each arrived, and how long it waited for its first token."""
    done = OnlineExperiment(**{key: value for key, value in setting.items() if key != "named"}).run()
    arrived = done.requests["arrival_s"].to_numpy()
    waits = arrived, done.requests["first_token_s"].to_numpy() - arrived
    return {"named": setting["named"], **figures_of(setting, done), "waits": waits}


def grid(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """B, S1 to S3. First tokens are compared with those of the same requests alone: who arrives later, waits less."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {name: cut_trace(f"azure2023_{name}", 1.5 * size.job_seconds, folder) for name in ("conv", "code")}
        alones, settings = [], []
        for exponent in exponents:
            for source, rate in TRAFFIC:
                alone = {"online": traces[source], "rate": rate, "tpot": TPOT, "overlap_exponent": exponent}
                alones.append({**alone, "policy": "slack", "named": f"{source} x {rate:g}, alone"})
            for setting in nine(exponent, traces):
                job = {**setting, "requests": max(100, rows_at(setting, size.job_seconds))}
                settings += [{**job, "policy": policy} for policy in ("slack", "ooco")]
                settings.append({**job, "policy": "slack", "tpot": LONG_TPOT})
                for step, running in FIXED:
                    fixed = {**job, "step_tokens": step, "max_running": running}
                    settings.append({**fixed, "policy": "priority"})
                    settings.append({**fixed, "policy": "fcfs", "outstanding": running})
        by_themselves, runs = [run_alone(alone) for alone in alones], rows.of(run_named, settings)
    waits = {
        (each["setting"]["overlap_exponent"], each["named"].partition(",")[0]): each.pop("waits")
        for each in by_themselves
    }
    for each in runs:
        arrived, waited = waits[each["setting"]["overlap_exponent"], each["named"].partition(",")[0]]
        same = waited[arrived <= each["figures"]["job"]["seconds"]]
        each["while_job_ran"]["alone_ttft_p99"] = float(np.percentile(same, 99))
    return by_themselves + runs


def load(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """B, S4 and S5."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {name: cut_trace(f"azure2023_{name}", size.load_seconds, folder) for name in ("conv", "code")}
        searches = []
        for exponent in exponents:
            for setting in nine(exponent, traces):
                search = {**setting, "duration": size.load_seconds, "policy": "slack"}
                alone = {name: search[name] for name in ("online", "rate", "tpot", "overlap_exponent", "policy")}
                search["alone_ttft_p99"] = run(alone)["figures"]["online"]["ttft_p99"]
                search["bound_rows"] = rows_at(setting, size.load_seconds)
                searches += [search, {**search, "policy": "ooco"}]
                for step, running in FIXED if not size.small else ((512, 64), (2048, 256)):
                    fixed = {**search, "step_tokens": step, "max_running": running}
                    searches += [{**fixed, "policy": "priority"}, {**fixed, "policy": "fcfs"}]
        return rows.of(most_held, searches)


def most_held(search: dict[str, Any]) -> dict[str, Any]:
    """Find the most rows of the job that end in a second, of the bound's, while at most 3 % of requests are violated.

    The job arrives at a rate in parts of the bound's. The highest that is held is found first. Where not all of its
    rows end in the time, lower ones are tried too, as long as more than was found can end. `slack` is handed the rows
    of a rate at once; others get them one by one.
    """
    of_search = ("named", "alone_ttft_p99", "bound_rows")
    setting = {name: value for name, value in search.items() if name not in of_search}
    rows, seconds = search["bound_rows"], setting["duration"]

    def ended_at(part: int) -> int | None:
        offered = {**setting, "requests": max(1, rows * part // PARTS)}
        if setting["policy"] != "slack":
            offered["offline_rate"] = offered["requests"] / seconds
        violated, ended = violations(offered, search["alone_ttft_p99"])
        return ended if violated <= 0.03 else None

    low, high, held = 0, PARTS, 0
    while low < high:
        middle = (low + high + 1) // 2
        ended = ended_at(middle)
        if ended is not None:
            low, held = middle, ended
        else:
            high = middle - 1
    best = low
    for part in range(low - 1, 0, -1):
        if rows * part // PARTS <= held:
            break
        ended = ended_at(part)
        if ended is not None and ended > held:
            best, held = part, ended
    found = {"bound_qps": rows / seconds, "offered": best / PARTS, "held": held / rows}
    return {"named": search["named"], "alone_ttft_p99": search["alone_ttft_p99"], "setting": named(setting), **found}


def pools(exponents: list[float], size: Size, rows: Rows) -> list[dict[str, Any]]:
    """B, S6. Of the two mixed engines one is run, with half of the traffic and of the job; the other is its like."""
    with tempfile.TemporaryDirectory() as folder:
        traces = {name: cut_trace(f"azure2023_{name}", 1.5 * size.job_seconds, folder) for name in ("conv", "code")}
        settings = []
        for exponent in exponents:
            for setting in nine(exponent, traces):
                most = max(100, rows_at(setting, size.job_seconds))
                settings.append({**setting, "requests": most, "policy": "slack"})
                two = {"policy": "ooco", "pools": POOLS, "rate": 2 * setting["rate"], "requests": 2 * most}
                settings.append({**setting, **two})
        return rows.of(run_named, settings)


TABLES = {"pools": pools, "bros": bros, "overload": overload, "memory": memory, "grid": grid, "load": load}


def main() -> None:
    """Run a table, and write it."""
    parser = argparse.ArgumentParser(description="Compare policies for online requests beside a job.")
    parser.add_argument("table", choices=[*TABLES, "none"], help="none: write the page from what is there")
    parser.add_argument("--small", action="store_true", help="a tenth of the time")
    parser.add_argument("--exponents", default="1,2,4")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--policies", help="of these alone, as slack,ooco; rows of others are kept as they are")
    options = parser.parse_args()
    if options.table != "none":
        size, path = SMALL if options.small else WHOLE, RESULTS / f"beside-{options.table}.json"
        exponents = [float(exponent) for exponent in options.exponents.split(",")]
        policies = options.policies.split(",") if options.policies else None
        earlier: dict[str, Any] = {"small": size.small, "runs": []}
        if policies and path.exists():
            earlier = json.loads(path.read_text())
        stopped = RESULTS / f"beside-{options.table}-stopped.jsonl"
        rows = Rows(options.jobs, stopped, policies, earlier["runs"] if earlier["small"] == size.small else [])
        results = TABLES[options.table](exponents, size, rows)
        path.write_text(json.dumps({"small": size.small, "runs": results}, indent=1) + "\n")
        rows.end()
        if rows.missing:
            raise SystemExit(f"{rows.missing} rows of other policies are not there: the page is not written")
    write_tables()


if __name__ == "__main__":
    main()
