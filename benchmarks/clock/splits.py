"""The search for the best split of devices, against all splits simulated: fifteen cases by the clock.

    python benchmarks/clock/splits.py [--jobs N] [--model M]

Three workloads, two models, two offers of devices; and a mixture on devices whose host is described. Each split is
simulated, and the search chooses; what it chose is compared with the best of all. Lengths are not known to the
scheduler. It needs the traces in $LLMBATCH_TRACES, and writes docs/results/splits.json and splits.md; cases of other
models than M stay in them as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.workload import Scheduling, Workload
from llmbatch.simulation.search import SearchedSplit, search
from llmbatch.simulation.simulator import MAX_RUNNING
from llmbatch.simulation.splits import Offer, host_of, splits_of
from llmbatch.simulation.traces import read_traces

WORKLOADS = {"conversations": ("azure2023_conv", 4000), "videos": ("video_panda70m", 256), "reasoning": (None, 256)}
MODELS = ("llama-3-8b", "llama-3-70b")
OFFERS = ({"h100": 8, "l40s": 8}, {"a100-80gb": 4, "h20": 8})
MIXTURE = ("mixtral-8x7b", {"a5000": 4, "a6000": 4}, {"memory": 1e12})
MOST_TOKENS = 32_768  # of an answer
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "splits.json"
PAGE = """# Which split of devices: by the clock

Written by `python benchmarks/clock/splits.py` ([decision 0094](../decisions/0094-which-split.md)): three workloads, two
models, two offers of devices; and a mixture on devices whose host has 1 TB (`--model mixtral-8x7b` runs these three
alone). Every split was simulated, and `explain --search` chose without that. Conversations are 4,000 rows of Azure's
trace of 2023, videos 256 rows of a trace of long answers, both cut at 32,768 tokens; reasoning is 256 rows of 200
tokens whose answers are log-normal (median 4,000, sigma 1.2, the same cut). Lengths are not known to the scheduler.
Devices are at .75 and .85 of their makers' peaks, kernels run in turn, and sums over devices are counted. "4 x 2 h100"
is four copies on two devices each; *host* says that weights lie in the host's memory. Nothing here ran on a GPU.

TABLE
The bounds of the splits are so near that in the first twelve cases three to six splits need no simulation. The search
took as long as it says beside other work on the machine.

Conversations run best in as many copies as leave room for their rows, long answers on all devices as one. There the
weights are read for few rows a step, and the last rows decide. Where a copy's pool is small (llama-3-70b on two H100
has room for 33,000 tokens) a job takes twice to eleven times as long. 8 x 1 h20 is slower than 4 x 2 for conversations:
the engines join at 114 s, where one of them is thought to need 17 s more and ends in 4.

KV in the host's memory as well makes an A5000 1.2 to 3.7 times as fast (conversations 8,384 for 12,285 s, videos 54,815
for 204,519, reasoning 40,121 for 49,565), and an A6000, which has room for more KV, .6 to .8 times: four copies share
the 205 GB/s of one host.
"""


class Case(NamedTuple):
    """Rows, a model, and devices."""

    workload: str
    model: str
    devices: dict[str, int]
    host: dict[str, float] | None = None


def rows_of(name: str) -> tuple[Workload, Any]:
    """A workload, and the tokens of its answers."""
    source, count = WORKLOADS[name]
    if source is None:  # short prompts and log-normal answers
        rng = np.random.default_rng(0)
        lengths = np.full(count, 200, np.int32)
        output = np.clip(4000 * rng.lognormal(0.0, 1.2, count), 1, MOST_TOKENS).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        tree = PrefixTree.build(rng.integers(0, 50_000, offsets[-1]).astype(np.int32), offsets)
    else:
        trace = read_traces([Path(os.environ["LLMBATCH_TRACES"]) / f"{source}.parquet"])[0].first(count)
        tree, output = trace.tree(), np.minimum(trace.output_lengths, MOST_TOKENS)
    zeros = np.zeros(count, np.int32)
    return Workload(tree, zeros + np.int32(MOST_TOKENS), zeros, zeros), output


def named(split: SearchedSplit) -> str:
    """Its devices, and what lies in their host's memory."""
    held = {"resident": "", "host": ", weights in the host's memory"}[split.weights]
    return f"{split.data_parallel} x {split.tensor_parallel} {split.device}{held}{', KV too' * (split.kv == 'host')}"


def run(case: Case) -> dict[str, Any]:
    """All splits, and what the search makes of them."""
    workload, output = rows_of(case.workload)
    host = None if case.host is None else host_of(case.host)
    splits = splits_of(Offer.all_of(case.devices), find_shape(case.model), host)
    scheduling = Scheduling(max_running=MAX_RUNNING)
    begun = time.perf_counter()
    found = search(workload, output, splits, scheduling)
    seconds = time.perf_counter() - begun
    held = {(one.device, one.tensor_parallel, one.weights, one.kv) for one in found}
    every = {}
    for split in splits:
        if (split.offer.hardware.name, split.tensor_parallel, split.weights, split.kv) not in held:
            continue  # its copies have no room for the longest row
        (one,) = search(workload, output, [split], scheduling)
        every[named(one)] = one.seconds
    best = found[0]
    assert best.seconds is not None, "the first is simulated"
    return {
        **case._asdict(),
        "chosen": named(best),
        "over_best": best.seconds / min(taken for taken in every.values() if taken is not None),
        "binding": best.binding,
        "seconds": every,
        "simulated": sum(one.seconds is not None for one in found),
        "search_seconds": seconds,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Markdown, a line a case."""
    header = ["rows", "model", "devices", "chosen", "next best", "slowest", "over the best of all (wanted: 1.03)"]
    header += ["binds", "simulated"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for one in found:
        devices = ", ".join(f"{count} {name}" for name, count in one["devices"].items())
        best = one["seconds"][one["chosen"]]
        others = sorted((seconds, name) for name, seconds in one["seconds"].items() if name != one["chosen"])
        (second, runner_up), (last, slowest) = others[0], others[-1]
        lines.append(
            f"| {one['workload']} | {one['model']} | {devices} | {one['chosen']}: {best:,.0f} s "
            f"| {shortened(runner_up)}: {second / best:.2f} x | {shortened(slowest)}: {last / best:.1f} x "
            f"| {one['over_best']:.3f} | {one['binding']} "
            f"| {one['simulated']} of {len(one['seconds'])}, {one['search_seconds']:.0f} s |"
        )
    return "\n".join(lines) + "\n"


def shortened(split: str) -> str:
    """Say in a word where the weights lie."""
    return split.replace(", weights in the host's memory", " (host)").replace("(host), KV too", "(host, KV too)")


def main() -> None:
    """Run the cases, print a line each, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--model", choices=(*MODELS, MIXTURE[0]))
    options = parser.parse_args()
    every_case = [Case(*each) for each in product(WORKLOADS, MODELS, OFFERS)]
    every_case += [Case(workload, *MIXTURE) for workload in WORKLOADS]
    cases = [case for case in every_case if options.model in (None, case.model)]
    kept = json.loads(RESULTS.read_text()) if options.model else []
    found = [one for one in kept if one["model"] != options.model]
    with ProcessPoolExecutor(options.jobs) as pool:
        for one in pool.map(run, cases):
            found.append(one)
            every = ", ".join(f"{name} {taken:,.0f}" for name, taken in one["seconds"].items())
            print(
                f"{one['workload']:14} {one['model']:12} chose {one['chosen']:16} {one['over_best']:.3f} of the best, "
                f"bound by {one['binding']}, {one['simulated']} of {len(one['seconds'])} simulated in "
                f"{one['search_seconds']:.1f} s; seconds: {every}",
                flush=True,
            )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(PAGE.replace("TABLE", table(found)))


if __name__ == "__main__":
    main()
