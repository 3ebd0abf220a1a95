"""The page docs/results/beside.md, from what beside.py measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from harness.simulations import RESULTS

HEAD = """# Online requests beside a job: by the clock

Written by `python benchmarks/clock/beside.py none` from what the tables' own commands left in beside-*.json. What the
policies are, and how gaps in the papers were read: [simulate.md](../simulate.md). The constants of `slack` were chosen
on other seeds (decisions [0080](../decisions/0080-what-guests-can-spare.md),
[0104](../decisions/0104-what-is-kept-free-for-guests.md) and
[0105](../decisions/0105-what-guests-would-hold-alone.md), which have figures of those, too), but for one of 0104: a row
of the first table had a part in it. All rows of `slack` are of decision 0105, those of other policies of before.
Nothing here ran on a GPU: seconds are those of the library's cost model, law `bytes`. e is the exponent by which
compute and memory overlap (1: not at all). `slack` is the library's own scheduler.
"""
BUDGET = "step_tokens", "max_running"
LIMIT = 0.2  # s, of BROS's steps
GAPS = 0.06  # s, that guests' gaps may take in the grid

BROS_TEXT = """## BROS's set-up

COMMAND: OPT-13B on 2 x A100-40GB, lengths of its Table 2 (ShareGPT), Poisson, 256 best-effort rows outstanding (the
paper gives no number), 10 minutesSMALL; targets .4 and .2 s. Wanted of `slack`: normalised latency over `fcfs` at most
.10 and below `round-robin`; both attainments .99; best effort over `fcfs` at least 1.0 at e = 4, .93 at e = 1.
*At most*: the rows that any schedule can end in that time whose steps read no more KV than the pool holds, and which
also serves every online request that has arrived by then. `fcfs` may pass it, for it lets online requests wait.
*Over fcfs* behind it: of the rows of `fcfs`. *Served*: the share of online requests that ended in that time. *Without
a job*: the normalised latency of `slack` over that of `fcfs` where `slack` has no best-effort rows at all: as good as
leaving the machine to online requests.

Steps are at most .2 s, the target, but that is not what makes `slack` wait: no step reads more than the pool holds, and
that takes .018 s beside .010 for the weights. A latency of .10 of `fcfs`'s takes shorter steps. In the rows with a
number of ms `slack` is told to take no longer ones: so many that each online request which has a token in each step
gets .10 (`llmbatch.simulation.online.bound.steps_of_latency`). *At most* is there what no schedule passes that has as
many steps. Where it is below the best effort that is wanted, the two bars exclude each other: at e = 1 for 2.5, 5 and
10 requests a second, and at e = 2 for 2.5, though there no best effort is asked for. Two latencies that are printed as
.1 at e = 4 are .1002 and .10003. Of 16 other seeds five have less than .99 in time at e = 1 and 10 requests a second
([decision 0105](../decisions/0105-what-guests-would-hold-alone.md)).
"""
OVERLOAD_TEXT = """## Past saturation

COMMAND: the same set-upSMALL. Capacity is the highest of the rates 10 to 22 at which both attainments are .99; wanted
of `slack`: .9 x capacity / offered. The paper has no such figures. `slack` holds that in all rows.
`bros` has no capacity among these rates.
"""
MEMORY_TEXT = """## Little memory

COMMAND: Llama-3-8B in the pool of an A100-40GB, azure2023_conv x .8 beside table2-3, an hourSMALL. `priority` preempts
whole rows. Wanted of `slack`: at most 1/5 of its tokens again, and 1.1 x its rows. (BROS 7.4.1, two-ended blocks
against recomputation: first token 1.23 x, gaps 1.63 x as often in time.)
"""
GRID_TEXT = """## Nine settings

COMMAND: Llama-3-8B on an A100-80GB, steps of at most 50 ms, each job as large as the bound ends at 2,400 sSMALL. First
tokens and gaps are of the requests that arrived while the job ran. Wanted of `slack`: the job's end at most 1.20 x the
bound, 1.15 in the mean; first token 1.20 x alone; gap 60 ms. OOCO has no such figures.

What is waited for, step by step ([decision 0073](../decisions/0073-waits-beside-a-job.md)): guests of the code traffic
wait for each other, not for memory or the job. From 860 to 864 s prompts of 92,509 tokens arrive, more compute than can
be in time in any order. A hundredth of all guests is late with a job and without one, so p99 lies at the edge of them.
Before `slack` left out the longest first, 2.6 % were late alone and 4.0 % beside a job, and p99 was 2.2 and 4.9 s. The
job waits where its pages are full while guests' prompts take the steps, and at its end for its last answers.

At e = 1 the rows of conv x .8 hold the job's end, but first tokens come 1.22 to 1.52 times as late as alone.
[Decision 0082](../decisions/0082-first-tokens-where-nothing-overlaps.md) says which guests those are, and has the
frontier, on seeds 3 and 4: no share and no pause of the job that was tried holds both bars in all of these settings.
Two other first tokens are above 1.20, both of conv x .5 beside ooco-offline: 1.22 at e = 2 and 1.21 at e = 4.

On seeds 3 and 4 six of the 54 jobs of `slack` end later than 1.20 of the bound, up to 1.40: there one or two answers
of 65,024 to 70,912 tokens run alone at last, which nothing told from others in time (decision 0105).
"""
FIXED_TEXT = """`priority` and `fcfs` (as many rows outstanding as may run) at step budgets of 256 to 2,048 tokens and
64 or 256 sequences: how many of the sixteen end the job sooner at the same or an earlier p99 first token (wanted:
none), and how many of these have p99.9 gaps of at most 60 ms, which is wanted, too. Then as budget/sequences: end over
the bound, first token over alone, p99.9 gap. Those that are better take long steps. *Long steps*: `slack`, where steps
may take 200 ms as theirs do; its end is over the same bound, that of 50 ms.
"""
LOAD_TEXT = """## Most load held

COMMAND: OOCO's protocol (5.2)SMALL, with one difference: `slack` is handed the rows of a rate at once, as the library
is, where others get them as they arrive. Counted are the most rows of the job that end in a second, of the bound's, at
any rate of arrival (in sixteenths of it) at which at most 3 % of online requests have a first token later than 1.15 x
alone's p99 or a mean gap above 55 ms. Wanted of `slack`: .80 of the bound, .90 in the mean (here MEAN); 2.5 x the
better baseline at 2,048-token steps (paper: 1.17 to 3 x); 1.05 x the best at any step, 1.17 x in the mean. `ooco` here
is one engine, not two pools.

No schedule passes 1. So where a baseline holds more than .40 at 2,048-token steps, 2.5 times that cannot be held: conv
x .5 at e = 1, and two of its rows at e = 2. Of all other rows one is below 2.5: conv x .5, table2-3 at e = 2, with 2.39
(2.53 before decision 0104). Where a baseline holds more than .95 at its best step, 1.05 times that cannot be held: five
rows of conv at e = 2 and four at e = 4; the mean over the best step is about 1.00 there, and 1.17 was wanted. There
`slack` holds .92 to 1.00 times as much, for rows are counted, and who leaves the longest for later has more of them. Of
all others one is below, at 1.04: conv x .5, ooco-offline at e = 4.

Once what ended at the highest of these rates was counted, whether or not more ended at a lower one. `slack` had .71
then for conv x .8 and table2-1 at e = 2, where it is handed a little too many rows. What is left of them when the hour
is over lies between the two ends of its order: a quarter of the rows, with a sixteenth of the work. Of 15/16 of the
rows it ends all. The 44 of 486 rows for which this can matter were run again, of every policy.
"""
POOLS_TEXT = """## Two pools

COMMAND: on two A100-80GB OOCO's relaxed and strict engine (`--policy ooco --pools strict=1,relaxed=1`), against two
mixed engines, each with half of the traffic and of the job, under `slack`SMALL. Wanted: mixed not behind at e >= 2.
"""


def write_tables() -> None:
    """Write the page."""
    parts = [HEAD]
    renders = {"bros": bros, "overload": overload, "memory": memory, "grid": grid, "load": load, "pools": pools}
    for name, render in renders.items():
        path = RESULTS / f"beside-{name}.json"
        if path.exists():
            written = json.loads(path.read_text())
            small = ", in a tenth of the time (`--small`)" if written["small"] else ""
            command = f"`python benchmarks/clock/beside.py {name}{' --small' if written['small'] else ''}`"
            parts.append(render(written["runs"]).replace("COMMAND", command).replace("SMALL", small))
    (RESULTS / "beside.md").write_text("\n".join(parts))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_shown(cell) for cell in line) + " |" for line in lines) + "\n"


def _shown(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 1000 else f"{cell:,.0f}" if isinstance(
        cell, float
    ) else str(cell)  # fmt: skip  # two forms of a number


def by_key(runs: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Find runs by values of their settings."""
    return {tuple(run["setting"].get(name) for name in names): run for run in runs}


def bros(runs: list[dict[str, Any]]) -> str:
    """A, S1 to S3."""
    beside = [run for run in runs if run["setting"]["offline"]]
    found = by_key(
        [run for run in beside if run["setting"]["tpot"] == LIMIT], "overlap_exponent", "per_second", "policy"
    )
    short = by_key([run for run in beside if run["setting"]["tpot"] != LIMIT], "overlap_exponent", "per_second")
    alone = by_key([run for run in runs if not run["setting"]["offline"]], "overlap_exponent", "per_second", "policy")
    listed: list[tuple[float, float, str, dict[str, Any]]] = []
    for (exponent, rate, policy), run in found.items():
        listed.append((exponent, rate, policy, run))
        if policy == "slack" and (exponent, rate) in short:
            run = short[exponent, rate]
            listed.append((exponent, rate, f"slack, {run['setting']['tpot'] * 1e3:.1f} ms", run))
    rows = []
    for exponent, rate, policy, run in listed:
        by_itself = alone.get((exponent, rate, policy))
        fcfs = found[exponent, rate, "fcfs"]["figures"]["online"]["normalised_latency"]
        figures, base = run["figures"], found[exponent, rate, "fcfs"]["figures"]
        online, job = figures["online"], figures["job"]
        rows.append(
            [
                exponent, rate, policy, online["normalised_latency"] * 1e3,
                online["normalised_latency"] / fcfs,
                by_itself and by_itself["figures"]["online"]["normalised_latency"] / fcfs, online["ttft_attainment"],
                online["tpot_attainment"], online["both_attainment"], job["rows_ended"],
                job["rows_ended"] / max(1, base["job"]["rows_ended"]), run["bound_rows"],
                run["bound_rows"] / max(1, base["job"]["rows_ended"]), run["served"], job["tokens_again"],
            ]
        )  # fmt: skip  # a table
    nothing = [None] * 4
    paper = [
        ["paper", "all", "fcfs (vLLM)", None, 1.0, None, 0.0128, "1/1.73 of BROS's", None, None, 1.0, *nothing],
        ["paper", "all", "round-robin", None, "0.56 (from 74.20 and 54.31 % less)", None, 0.1055, 0.4734, None, None,
         "0.97 (from -11.29 and -8.80 %)", *nothing],
        ["paper", "all", "bros", None, 0.258, None, "36.38 x vLLM's", 0.6549, None, None, 0.887, *nothing],
    ]  # fmt: skip  # a table
    header = [
        "e", "requests/s", "policy", "normalised, ms", "over fcfs", "without a job", "first token in time",
        "mean gap in time", "both",
        "best-effort rows", "over fcfs", "at most", "over fcfs", "served", "tokens again",
    ]  # fmt: skip  # a table
    return BROS_TEXT + "\n" + table(header, [*paper, *rows])


def overload(runs: list[dict[str, Any]]) -> str:
    """A, S4."""
    found = by_key(runs, "overlap_exponent", "policy", "per_second")
    rows = []
    for exponent, policy in dict.fromkeys((key[0], key[1]) for key in found):
        held = [
            rate
            for (e, p, rate), run in found.items()
            if (e, p) == (exponent, policy)
            and min(run["figures"]["online"][f"{name}_attainment"] for name in ("ttft", "tpot")) >= 0.99
        ]
        capacity = max(held, default=None)
        for rate in (14.0, 18.0, 22.0):
            both = found[exponent, policy, rate]["figures"]["online"]["both_attainment"]
            wanted = None if capacity is None else 0.9 * min(1.0, capacity / rate)
            rows.append([exponent, policy, capacity or "below 10", rate, both, wanted])
    header = ["e", "policy", "capacity, requests/s", "offered", "both targets met", "wanted"]
    return OVERLOAD_TEXT + "\n" + table(header, rows)


def memory(runs: list[dict[str, Any]]) -> str:
    """A, S5."""
    found = by_key(runs, "overlap_exponent", "policy")
    rows = []
    for (exponent, policy), run in found.items():
        job, base = run["figures"]["job"], found[exponent, "priority"]["figures"]["job"]
        again, ended = job["tokens_again"], job["rows_ended"]
        rows.append(
            [exponent, policy, again, again / max(1, base["tokens_again"]), ended, ended / max(1, base["rows_ended"]),
             job["tokens_computed"], run["figures"]["online"]["ttft_p99"], run["figures"]["online"]["gap_p999"]]
        )  # fmt: skip  # a table
    header = ["e", "policy", "tokens again", "over priority", "rows", "over priority", "tokens", "p99 first token, s",
              "p99.9 gap, s"]  # fmt: skip  # a table
    return MEMORY_TEXT + "\n" + table(header, rows)


def grid(runs: list[dict[str, Any]]) -> str:
    """B, S1 to S3."""
    rows: list[list[object]] = []
    best: dict[tuple[Any, str], dict[str, list[tuple[float, float, float, str]]]] = {}
    for run in runs:
        if run["named"].endswith("alone"):
            continue
        setting, job, beside = run["setting"], run["figures"]["job"], run["while_job_ran"]
        exponent, policy = setting["overlap_exponent"], setting["policy"]
        waited = beside["ttft_p99"] / beside["alone_ttft_p99"]
        kind = policy if policy in ("slack", "ooco") else "fixed"
        if kind == "slack" and setting["tpot"] > GAPS:
            kind, policy = "long", f"slack, {setting['tpot'] * 1e3:.0f} ms"
        name = policy if kind != "fixed" else f"{policy} {setting['step_tokens']}/{setting['max_running']}"
        of_job = best.setdefault((exponent, run["named"]), {})
        ends = job["seconds"], run["figures"]["bound_seconds"]
        of_job.setdefault("bound", [(ends[1], 0.0, 0.0, "bound")])
        ratio = ends[0] / of_job["bound"][0][0]  # of slack's steps, which come first
        of_job.setdefault(kind, []).append((ratio, waited, beside["gap_p999"], name))
        if kind in ("slack", "ooco"):
            rows.append([exponent, run["named"], policy, job["rows"], ratio, waited, beside["gap_p999"] * 1e3])
    summary = []
    for (exponent, named), kinds in best.items():
        (ours,), (long,) = kinds["slack"], kinds["long"]
        sooner = [each for each in kinds["fixed"] if each[0] < ours[0] and each[1] <= ours[1]]
        near = min((each for each in kinds["fixed"] if each[1] <= ours[1]), default=None)
        gaps = [each for each in kinds["fixed"] if each[2] <= GAPS]
        summary.append(
            [exponent, named, ours[0], ours[1], len(sooner), sum(each in gaps for each in sooner), _point(near),
             _point(long), _point(min(gaps, default=None)), _point(min(kinds["fixed"]))],
        )  # fmt: skip  # a table
    ratios = [ratio for kinds in best.values() for ratio, *_ in kinds["slack"]]
    mean = f"The mean of `slack` over all is {np.mean(ratios):.3f}.\n\n" if ratios else ""
    header = ["e", "traffic, job", "policy", "rows", "job's end over the bound", "p99 first token over alone",
              "p99.9 gap, ms"]  # fmt: skip  # a table
    other = ["e", "traffic, job", "slack: end", "first token", "better in both", "and in gaps",
             "soonest at no later first token", "slack, long steps", "soonest with short gaps",
             "soonest fixed"]  # fmt: skip  # a table
    return "\n".join([GRID_TEXT, table(header, rows), mean + FIXED_TEXT, table(other, summary)])


def _point(point: tuple[float, float, float, str] | None) -> str:
    return "none" if point is None else f"{point[3]}: {point[0]:.2f}, {point[1]:.2f}, {point[2] * 1e3:.0f} ms"


def load(runs: list[dict[str, Any]]) -> str:
    """B, S4 and S5."""
    rows = []
    for exponent, named in dict.fromkeys((run["setting"]["overlap_exponent"], run["named"]) for run in runs):
        held: dict[str, float] = {}
        for run in runs:
            setting = run["setting"]
            if (setting["overlap_exponent"], run["named"]) == (exponent, named):
                whole = setting["policy"] in ("slack", "ooco")
                name = setting["policy"] if whole else " ".join(str(setting[each]) for each in ("policy", *BUDGET))
                held[name], bound = run["held"], run["bound_qps"]
        fixed = {name: value for name, value in held.items() if name not in ("slack", "ooco")}
        whole_steps = max(fixed[name] for name in fixed if " 2048 " in name)
        best = max(fixed, key=fixed.__getitem__)
        ours = held["slack"]
        rows.append(
            [exponent, named, bound, ours, held["ooco"], whole_steps, _over(ours, whole_steps),
             f"{best}: {fixed[best]:.2f}",
             _over(ours, fixed[best])]
        )  # fmt: skip  # a table
    of_bound = [run["held"] for run in runs if run["setting"]["policy"] == "slack"]
    header = ["e", "traffic, job", "bound, rows/s", "slack, of it", "ooco", "best at 2,048 tokens", "slack over it",
              "best fixed", "slack over it"]  # fmt: skip  # a table
    return LOAD_TEXT.replace("MEAN", f"{float(np.mean(of_bound)):.3f}") + "\n" + table(header, rows)


def pools(runs: list[dict[str, Any]]) -> str:
    """B, S6."""
    found = {(run["setting"]["overlap_exponent"], run["named"], run["setting"]["policy"]): run for run in runs}
    rows = []
    for exponent, named in dict.fromkeys(key[:2] for key in found):
        mixed, two = (found[exponent, named, policy] for policy in ("slack", "ooco"))
        ends = [run["figures"]["job"]["seconds"] for run in (mixed, two)]
        waits = [run["while_job_ran"]["ttft_p99"] for run in (mixed, two)]
        gaps = [run["while_job_ran"]["gap_p999"] * 1e3 for run in (mixed, two)]
        rows.append([exponent, named, *ends, ends[1] / ends[0], *waits, *gaps])
    header = ["e", "traffic, job (of each engine)", "mixed: job's end, s", "pools", "pools over mixed",
              "mixed: p99 first token, s", "pools", "mixed: p99.9 gap, ms", "pools"]  # fmt: skip  # a table
    return POOLS_TEXT + "\n" + table(header, rows)


def _over(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "they hold none"
