"""Eight devices by the clock as one, as eight that join at the end, and as eight that stay apart.

    python benchmarks/clock/joined_or_apart.py [--seeds 1,2,3]

Writes docs/results/joined-or-apart.md: what it runs is said there. Traces are read from the folder that
$LLMBATCH_TRACES names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from harness.simulations import RESULTS, SOURCES, path_of

from llmbatch.perf_model.collectives import on_joined
from llmbatch.perf_model.cost import CostModel, Overlap
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Scheduling
from llmbatch.simulation.mix_draws import draw_mix
from llmbatch.simulation.mixes import MIXES
from llmbatch.simulation.options import Knowledge
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import MAX_RUNNING, pool_of
from llmbatch.simulation.traces import Trace, read_traces

DEVICES = 8
ROWS = 10_000
DEVICE = find_hardware("a100-80gb")
COST = CostModel(find_shape("llama-3-8b"), DEVICE, overlap=Overlap(4), law="bytes")
TEXT = """# Eight devices as one, or apart: by the clock

Written by `python benchmarks/clock/joined_or_apart.py`. 10,000 rows of the mix table2-2, Llama-3-8B on eight A100-80GB,
law `bytes`, e = 4. The longest of these answers has some 70,000 tokens, which one device decodes in 11 minutes. Sums
over devices are counted: two a layer, of 10 us and of their bytes at 300 GB/s. Nothing here ran on a GPU.

*As one*: each device has an eighth of every layer. *Join*: eight copies of the model take rows of each other, and join
where that ends sooner ([decision 0090](../decisions/0090-even-ends.md)). *Apart*: copies take rows of each other, and
never join. Wanted: as one in .35 of the seconds of apart.

| lengths | seed | longest answer | as one, s | join, s | apart, s | as one over apart | join over apart |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def seconds(trace: Trace, lengths: Knowledge, seed: int) -> Iterator[float]:
    """Seconds of the rows on all devices: as one, of copies that join, and of copies that stay apart."""
    pool, scheduling = pool_of(COST, None), Scheduling(max_running=MAX_RUNNING, seed=seed)
    apart = replace(COST, hardware=replace(DEVICE, link=None))
    for cost, pages, copies in (
        (on_joined(COST, DEVICES), pool.times(DEVICES), 1),
        (COST, pool, DEVICES),
        (apart, pool, DEVICES),
    ):
        yield simulate_trace(trace, cost, pages, scheduling, lengths=lengths, replicas=copies).report.seconds


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description="Compare eight devices that are one with eight copies.")
    parser.add_argument("--seeds", default="1,2,3", help="of the rows that are drawn, and of the samples")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    traces = read_traces([path_of(source) for source in SOURCES])
    page = TEXT
    kinds: tuple[Knowledge, ...] = ("sampled", "known")
    for lengths in kinds:
        for seed in seeds:
            trace = draw_mix(traces, MIXES["table2-2"], ROWS, COST, seed=seed).trace
            one, join, apart = seconds(trace, lengths, seed)
            longest = int(trace.output_lengths.max())
            cells = f"{one:,.0f} | {join:,.0f} | {apart:,.0f} | {one / apart:.3f} | {join / apart:.3f} |"
            page += f"| {lengths} | {seed} | {longest:,} | {cells}\n"
            print(page.splitlines()[-1], flush=True)
    (RESULTS / "joined-or-apart.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
