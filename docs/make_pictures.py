"""Draw the pictures of docs/design.md from request traces, as SVG in docs/pictures.

    LLMBATCH_TRACES=FOLDER python docs/make_pictures.py [NAME...]      (needs matplotlib: pip install -e .[bench])

The traces are those of docs/simulate.md: azure2023_code, mmlu_5shot, video_panda70m and sharegpt_lengths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection

from llmbatch.perf_model.cost import CostModel, Law
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import LengthModel
from llmbatch.policies import Policy
from llmbatch.simulation.experiment import Experiment
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.traces import Trace, read_traces

PICTURES = Path(__file__).parent / "pictures"
SOURCES = ("azure2023_code", "mmlu_5shot", "video_panda70m")
COLOURS = ("tab:orange", "tab:blue", "tab:green")
WINDOWS = 150  # points of a curve over time


def path_of(source: str) -> str:
    """Name the file of a trace."""
    folder = os.environ.get("LLMBATCH_TRACES")
    if not folder:
        raise SystemExit("traces are needed: set LLMBATCH_TRACES to the folder of the traces")
    return str(Path(folder) / f"{source}.parquet")


def read(source: str) -> Trace:
    """Read one trace."""
    return read_traces([path_of(source)])[0]


def draw(requests: int, order: Policy = "blend") -> Experiment:
    """Draw the paper's first mix."""
    return Experiment(
        traces=[path_of(source) for source in SOURCES], mix="table2-1", requests=requests, lengths="known", order=order
    )


def box(left: int, right: int, top: int, bottom: int) -> list[tuple[int, int]]:
    """Give the corners of a rectangle."""
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def tree() -> None:
    """Draw the prefix tree of 300 requests: a box a node, as wide as its rows and as long as its own tokens."""
    trace = draw(300).trace
    nodes = trace.tree()
    top = nodes.depth[np.maximum(nodes.parent, 0)]
    source = trace.source[nodes.rows[nodes.first]]
    single = [np.ptp(trace.source[nodes.rows[a:b]]) == 0 for a, b in zip(nodes.first, nodes.last, strict=True)]
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for index, name in enumerate(trace.names):
        chosen = np.flatnonzero(np.array(single) & (source == index))
        boxes = [box(nodes.first[v], nodes.last[v], top[v], nodes.depth[v]) for v in chosen]
        axis.add_collection(
            PolyCollection(boxes, facecolor=COLOURS[index], edgecolor="white", linewidth=0.2, label=name)
        )
    axis.set_xlim(0, len(nodes))
    axis.set_ylim(4000, 0)
    axis.set_xlabel("requests, sorted by their prompts")
    axis.set_ylabel("prompt tokens")
    axis.legend(loc="lower left", fontsize="small")
    figure.savefig(PICTURES / "tree.svg")


def lengths() -> None:
    """Draw what a half-run sample of 60 answers says of all: with the running ones counted, and without."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, source in zip(axes, ("sharegpt_lengths", "video_panda70m"), strict=True):
        trace = read(source)
        answers = trace.output_lengths
        sample = np.random.default_rng(1).permutation(len(trace))[:60].astype(np.int32)
        seen = int(np.median(answers[sample]))  # half of them have ended
        ended = answers[sample] <= seen
        model = LengthModel(trace.tree(), np.full(len(trace), 131_072, np.int32))
        model.observe(sample, np.minimum(answers[sample], seen).astype(np.int32), ended)
        model.refresh()
        grid = np.unique(np.geomspace(1, 131_072, 120).astype(np.int64))
        axis.plot(grid, [(answers > x).mean() for x in grid], "k", label="all answers of the trace")
        axis.plot(
            model.edges,
            model.survival[0],
            "tab:blue",
            label="by the sample, half of it running",
        )
        axis.plot(
            grid,
            [(answers[sample][ended] > x).mean() for x in grid],
            "tab:red",
            ls="--",
            label="by its finished half alone",
        )
        axis.axvline(seen, color="grey", lw=0.8, ls=":")
        axis.set_xscale("log")
        axis.set_xlabel(f"tokens: {source}")
    axes[0].set_ylabel("share of answers that are longer")
    axes[1].legend(fontsize="x-small", loc="lower left")
    figure.savefig(PICTURES / "lengths.svg")


def blending() -> None:
    """Draw compute and memory time over a job, under three orders."""
    orders: tuple[Policy, ...] = ("blend", "dual-scan", "dfs")
    figure, axes = plt.subplots(len(orders), 1, figsize=(9, 5.4), sharex=True, sharey=True, layout="constrained")
    for axis, order in zip(axes, orders, strict=True):
        experiment = draw(20_000, order)
        cost = experiment.cost
        log = simulate_trace(experiment.trace, cost, experiment.pool, experiment.scheduling, lengths="known").steps
        tokens = log["prefill_tokens"] + log["decode_tokens"]
        compute = np.maximum(cost.prompt_seconds(tokens), cost.rates.weight_seconds)
        memory = log["kv_read_tokens"] * cost.rates.seconds_per_kv_token
        clock = np.cumsum(log["time_s"])
        window = np.minimum((clock / clock[-1] * WINDOWS).astype(np.int64), WINDOWS - 1)
        length = np.bincount(window, log["time_s"], WINDOWS)
        minutes = (np.arange(WINDOWS) + 0.5) / WINDOWS * clock[-1] / 60
        axis.plot(minutes, np.bincount(window, compute, WINDOWS) / length, label="compute")
        axis.plot(minutes, np.bincount(window, memory, WINDOWS) / length, label="memory")
        axis.set_ylabel(order)
        axis.axvline(clock[-1] / 60, color="grey", lw=0.8)
    axes[0].set_ylim(0, 1.05)
    axes[0].legend(loc="lower left", ncols=2, fontsize="small")
    axes[-1].set_xlabel("minutes; the grey line is the end of the job")
    figure.supylabel("share of the time that a resource is busy", fontsize="medium")
    figure.savefig(PICTURES / "blending.svg")


def pages() -> None:
    """Draw the prefix sharing that orders reach in pools of different sizes."""
    memories = np.array([0.5, 1, 2, 4, 8, 16])  # GB
    orders: tuple[Policy, ...] = ("dfs", "input", "random")
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for order in orders:
        reached = []
        for memory in memories:
            experiment = Experiment(
                traces=[path_of("mmlu_5shot")], requests=6_000, lengths="known", order=order, kv_memory=memory * 1e9
            )
            report = experiment.run().report
            reached.append(report.prefix_sharing / report.prefix_sharing_optimal)
        axis.plot(memories, reached, "o-", label=order)
    axis.set_xscale("log", base=2)
    axis.set_xticks(memories, [f"{memory:g}" for memory in memories])
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("GB of KV for Llama-3-8B; 6,000 requests of mmlu_5shot")
    axis.set_ylabel("prefix sharing, of the possible")
    axis.legend(fontsize="small")
    figure.savefig(PICTURES / "pages.svg")


def overlap() -> None:
    """Draw requests by their compute and memory seconds, and a step's seconds by its tokens under both laws."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    shape, hardware = find_shape("llama-3-8b"), find_hardware("a100-80gb")
    cost = CostModel(shape, hardware)
    for source, colour in zip(SOURCES, COLOURS, strict=True):
        trace = read(source)
        rows = np.random.default_rng(0).permutation(len(trace))[:120]
        prompt, answer = trace.prompt_lengths[rows], trace.output_lengths[rows].astype(np.float64)
        memory = cost.request_memory(prompt, answer, answer**2)
        left.loglog(memory, cost.request_compute(prompt, answer), ".", ms=3, color=colour, label=source)
    ends = np.array([1e-6, 1e3])
    left.loglog(ends, ends, "k", lw=0.8)
    left.set_xlim(1e-5, 2e2)
    left.set_ylim(1e-3, 1e1)
    left.set_xlabel("memory seconds of a request")
    left.set_ylabel("compute seconds")
    left.legend(fontsize="small", loc="lower right")
    tokens = np.arange(16, 2049, 16)
    laws: tuple[Law, ...] = ("paper", "bytes")
    for law in laws:
        model = CostModel(shape, hardware, law=law)
        seconds = [model.step_time(int(n), 0.0, 200_000.0, int(n)) for n in tokens]
        right.plot(tokens, np.array(seconds) * 1e3, label=f"law {law}")
    right.plot(tokens, cost.prompt_seconds(tokens) * 1e3, "k:", lw=0.8, label="compute of its tokens")
    right.set_ylim(0)
    right.set_xlabel("tokens of a step that reads 200,000 tokens of KV")
    right.set_ylabel("milliseconds")
    right.legend(fontsize="small", loc="upper left")
    figure.savefig(PICTURES / "overlap.svg")


ALL: dict[str, Callable[[], None]] = {
    "tree": tree, "lengths": lengths, "blending": blending, "pages": pages, "overlap": overlap,
}  # fmt: skip  # a table

if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "llmbatch"  # equal traces give equal files
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or ALL:
        ALL[name]()
