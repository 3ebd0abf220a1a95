"""Pictures of the results in docs/results, as SVG beside them.

    python benchmarks/clock/pictures.py          (needs matplotlib: pip install -e .[bench])

policies.svg: fractions of the optimum and of the possible sharing (BlendServe's Figures 7 and 9), from table2.json and
wide.json. grid.svg: what `blend` gains over density and sharing (Figure 11), from grid.json. steps.svg: compute and
memory time over a job (Figure 10), from two simulations that run here.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import matplotlib as mpl
import numpy as np
from harness.simulations import RESULTS, Setting, baseline, blend, gain
from matplotlib import pyplot as plt

from llmbatch.planning.order import Policy
from llmbatch.simulation.replicas import simulate_trace

_WINDOW = 200  # points of a curve over time


def read(name: str) -> list[dict[str, Any]]:
    """The results of a table."""
    results: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


def policies() -> None:
    """Bars: a group a mix, a bar a policy."""
    results = read("table2") + read("wide")[:1]
    bars = {
        "blend, lengths known": [blend(result) for result in results],
        "blend, sampled": [blend(result, "sampled") for result in results],
        "best dual-scan": [baseline(result, "dual-scan") for result in results],
        "best random": [baseline(result, "random") for result in results],
        "best dfs": [baseline(result, "dfs") for result in results],
        "dfs at 2,048": [baseline(result, "dfs", 2048) for result in results],
    }
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    width = 0.8 / len(bars)
    for place, (name, runs) in enumerate(bars.items()):
        x = np.arange(len(results)) + (place - (len(bars) - 1) / 2) * width
        upper.bar(x, [run["fraction_of_optimal"] for run in runs], width, label=name)
        lower.bar(x, [run["prefix_sharing"] / run["prefix_sharing_optimal"] for run in runs], width)
    upper.set_ylabel("fraction of the optimum")
    upper.legend(ncols=3, fontsize="small", loc="lower center")
    lower.set_ylabel("sharing, of the possible")
    lower.set_xticks(np.arange(len(results)), [result["setting"]["mix"] for result in results])
    figure.savefig(RESULTS / "policies.svg")


def grid() -> None:
    """Heat maps over density and sharing."""
    results = read("grid")
    cells = {tuple(float(x) for x in result["setting"]["mix"].split(",")): result for result in results}
    densities, sharings = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    orders: tuple[Policy, ...] = ("dfs", "random")
    figure, axes = plt.subplots(len(orders), 1, figsize=(9, 5), layout="constrained")
    for axis, order in zip(axes, orders, strict=True):
        gains = np.array([[gain(cells[d, s], order) for d in densities] for s in sharings])
        axis.imshow(gains, aspect="auto", origin="lower", cmap="viridis")
        for row, column in np.ndindex(*gains.shape):
            axis.text(column, row, f"{gains[row, column]:.2f}", ha="center", va="center", color="white", fontsize=8)
        axis.set_xticks(range(len(densities)), [f"{d:.2f}" for d in densities])
        axis.set_yticks(range(len(sharings)), [f"{s:.2f}" for s in sharings])
        axis.set_title(f"blend over the best {order}", fontsize="medium")
        axis.set_ylabel("sharing")
    axes[-1].set_xlabel("compute density")
    figure.savefig(RESULTS / "grid.svg")


def steps() -> None:
    """Compute and memory time per second of the job, for `blend` and for `dfs`."""
    setting = Setting(mix="table2-2")
    orders: tuple[Policy, ...] = ("blend", "dfs")
    figure, axes = plt.subplots(len(orders), 1, figsize=(9, 5), sharex=True, layout="constrained")
    for axis, order in zip(axes, orders, strict=True):
        experiment = setting.experiment(order=order, lengths="known")
        cost = experiment.cost
        log = simulate_trace(experiment.trace, cost, experiment.pool, experiment.scheduling, lengths="known").steps
        tokens = log["prefill_tokens"] + log["decode_tokens"]
        shape, hardware = cost.shape, cost.hardware
        compute = np.maximum(2.0 * shape.params * tokens / hardware.flops, cost.rates.weight_seconds)
        compute += 4.0 * shape.attention_width * shape.layers * log["prefill_pairs"] / hardware.flops
        memory = log["kv_read_tokens"] * (shape.kv_bytes_per_token / hardware.bytes_per_second)
        clock = np.cumsum(log["time_s"])
        window = np.minimum((clock / clock[-1] * _WINDOW).astype(np.int64), _WINDOW - 1)
        length = np.bincount(window, log["time_s"], _WINDOW)
        hours = (np.arange(_WINDOW) + 0.5) / _WINDOW * clock[-1] / 3600
        axis.plot(hours, np.bincount(window, compute, _WINDOW) / length, label="compute")
        axis.plot(hours, np.bincount(window, memory, _WINDOW) / length, label="memory")
        axis.set_ylabel(f"{order}: share of the time")
        axis.set_ylim(0, 1.05)
    axes[0].legend(loc="lower left")
    axes[-1].set_xlabel("hours on one A100-80GB, table2-2")
    figure.savefig(RESULTS / "steps.svg")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    mpl.rcParams["svg.hashsalt"] = "llmbatch"  # equal results give equal files
    policies()
    grid()
    steps()
