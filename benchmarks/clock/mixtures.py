"""Mixtures of experts by the clock: on one small card with weights in host memory, and on many large ones.

    python benchmarks/clock/mixtures.py

Writes docs/results/mixtures.md: what is run is said there.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
from harness.simulations import RESULTS

from llmbatch.engine.model.outline import POOL_SHARE, streamed_running
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.engine.weights.streamed_cost import streamed_cost
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import RESERVED, Hardware, find_hardware
from llmbatch.perf_model.residency import (
    BUFFERS,
    Host,
    blocks_of,
    bytes_of_layers,
    with_host_kv,
    with_host_weights,
)
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.simulation.replicas import simulate_trace
from llmbatch.simulation.simulator import SimulationReport, pool_of
from llmbatch.simulation.traces import Trace

HOST = Host(memory=1e12, bandwidth=204.8e9, link=32e9)
# The processor of that host. How fast its kernels attend to prompts is taken, not known.
PROCESSOR = Hardware(name="host", compute=1e12, bandwidth=HOST.bandwidth, memory=HOST.memory)
# Of a node of eight cards: the paper has PCI Express 5.0 and 2 TB. 16 channels of DDR5-4800 are taken, not known.
NODE = Host(memory=2e12, bandwidth=614.4e9, link=8 * 64e9)
NODE_KEEPS = 0.05  # of its memory, for all else
RUNNING = 2048  # sequences in flight on a GPU, at least
BLOCK = 16  # tokens of a page
# Rows, tokens of a prompt and of an answer.
DATA = {"GSM8K": (8500, 512, 256), "ChatBotArena": (36_000, 256, 512), "decode-heavy": (1000, 256, 2048)}
# Hours of the paper's Table 7: BatchGen, the best other system (MoE-Lightning).
TABLE7 = {
    ("mixtral-8x7b", "GSM8K"): (1.7, 7.3),
    ("mixtral-8x7b", "ChatBotArena"): (10.0, 58.5),
    ("mixtral-8x22b", "GSM8K"): (5.1, 32.5),
    ("mixtral-8x22b", "ChatBotArena"): (30.8, 295.0),
    ("deepseek-r1", "GSM8K"): (41.3, None),
    ("deepseek-r1", "ChatBotArena"): (328.5, None),
}
# The paper's table, model, devices, their number, rows, tokens of a prompt and of an answer; minutes of BatchGen and of
# the best other system.
LARGE: tuple[tuple[str, str, str, int, int, int, int, float, float | None], ...] = (
    ("3", "deepseek-r1", "h20", 8, 6000, 8192, 2048, 625.1, 816.7),
    ("3", "deepseek-r1", "h20", 8, 6000, 2048, 8192, 1684.1, 3116.7),
    ("3", "deepseek-r1", "h20", 16, 6000, 8192, 2048, 82.6, 137.0),
    ("3", "deepseek-r1", "h20", 16, 6000, 2048, 8192, 194.3, 242.5),
    ("3", "deepseek-r1", "h200", 8, 6000, 8192, 2048, 75.1, 95.2),
    ("3", "deepseek-r1", "h200", 8, 6000, 2048, 8192, 165.0, 208.3),
    ("3", "kimi-k2", "h20", 16, 6000, 8192, 2048, 116.8, 150.6),
    ("3", "kimi-k2", "h20", 16, 6000, 2048, 8192, 317.5, 430.6),
    ("3", "kimi-k2", "h200", 8, 6000, 8192, 2048, 125.0, 167.5),
    ("3", "kimi-k2", "h200", 8, 6000, 2048, 8192, 392.0, 525.0),
    ("5", "deepseek-r1", "h20", 32, 10_000, 12_288, 4096, 139.7, 239.2),
    ("5", "deepseek-r1", "h20", 64, 10_000, 12_288, 4096, 66.3, 120.8),
    ("5", "deepseek-r1", "h20", 128, 10_000, 12_288, 4096, 33.5, 61.1),
    ("5", "deepseek-r1", "h20", 32, 10_000, 6656, 2867, 63.9, 139.9),
    ("5", "deepseek-r1", "h20", 64, 10_000, 6656, 2867, 30.4, 71.2),
    ("5", "deepseek-r1", "h20", 128, 10_000, 6656, 2867, 15.5, 36.0),
    ("6", "deepseek-r1", "h20", 128, 10_000, 8192, 2048, 17.5, 38.6),
)
# Of 8 H20 with KV in host memory: model, rows, tokens of a prompt and of an answer, and the paper's minutes.
SMALL: tuple[tuple[str, int, int, int, float, float | None], ...] = (
    ("deepseek-r1", 6000, 8192, 2048, 625.1, 816.7),
    ("deepseek-r1", 6000, 2048, 8192, 1684.1, 3116.7),
    ("kimi-k2", 6000, 8192, 2048, 659.8, None),
    ("kimi-k2", 6000, 2048, 8192, 1693.6, None),
)
TEXT = """# Mixtures of experts by the clock

Written by `python benchmarks/clock/mixtures.py`. Nothing here ran on a GPU. What a step reads of experts, and what
weights in host memory cost: [decision 0096](../decisions/0096-experts-and-links.md). Rows of an expert take whole
tiles: [decision 0112](../decisions/0112-tiles-of-experts.md). Law `paper`, e = 4, lengths known: each row of a workload
has the same, as the paper says of them.

## Weights in host memory (BatchGen's Table 7)

One A5000 (24 GB, 111 TFLOP/s, 768 GB/s) beside a host of 1 TB at 204.8 GB/s, over a link of 32 GB/s, each at .85 of
it. *Not combined*: KV lies on the card, in what two layers and two experts leave, so a step has the decodes of those
rows. *Combined*: KV lies in host memory, where the host attends, so thousands of decodes pass the experts together.
Wanted: not combined takes 5 times as long and more where decodes are most of the work; the paper's largest is 9.6, over
a baseline that it built anew.

The paper says neither how answers end nor what share of peak its kernels reach, so hours are beside its own for the
order of magnitude. Here a row ends at its length, KV never moves over the link, and DeepSeek-R1 is multiplied at the
card's 16-bit rate although its weights have 8 bits; converting them costs nothing here. The host attends at the rate
of its memory: for DeepSeek-R1's latent KV, 242 FLOP a byte, that takes 42 TFLOP/s, which hosts do not have. So its
combined hours are a bound from below. The paper has no Qwen 3. T: tokens a step, combined and not.

| model | workload | rows, prompt, answer | combined, h | not, h | over combined | T | paper: BatchGen, best other, h |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
ENGINE = """
The table above is BatchGen's algorithm under the paper's law. The next one is what `--weights host` does, with `--kv
host` and with `--kv device` ([decision 0102](../decisions/0102-the-host-attends.md)): layers come whole, products hide
the copies, attention waits for products and they for it. With `--kv host` the host attends to prompts as well, at 1
TFLOP/s (taken, not measured); half of the memory that the weights leave is for KV, and 4,096 rows are in flight. With
`--kv device` the card has two layers, and KV in all else. Of DeepSeek-R1 two layers with all their experts take more
than this card has. T: tokens a step.

| model | workload | `--kv host`, h | `--kv device`, h | over `--kv host` | T |
| --- | --- | --- | --- | --- | --- |
"""
MANY = """
## Many devices (Tables 3, 5 and 6)

DeepSeek-R1 and Kimi-K2, weights of 1 byte on the cards, of which all together hold one copy (two copies of 64 where the
paper has two). What devices say to each other is not counted, and KV is spread over all of them; so this is the least
that the clock allows, not a forecast. SGLang was tuned by the paper; of Table 6 its best split of prefill and decode is
here.

| table | model | devices | rows, prompt, answer | by the clock, min | of the optimum | BatchGen, best other, min |
| --- | --- | --- | --- | --- | --- | --- |
"""
FEW = """
## KV in host memory beside eight cards (Table 3)

On 8 H20 DeepSeek-R1 leaves 8 % of the memory for KV, and Kimi-K2 does not fit. So KV lies in the node's 2 TB here.
*Links*: KV comes over the cards' links at each step (8 of 64 GB/s at .85), and the cards attend. Weights that the cards
have no room for come the same way, one after the other with KV; the cards keep the rest, or nothing, as in the first
table. *Host attends*: the law of that table, KV read at 614 GB/s (taken, not known) at .85. That is 242 FLOP a byte for
DeepSeek-R1 and 121 for Kimi-K2: 126 and 63 TFLOP/s, which hosts do not have. So it shows what a faster link would give.
Over the links: bytes of weights that each step brings at most, and rows that the pool holds at their full length. *On
cards*: KV is there. All else is minutes.

| model | rows, prompt, answer | over the links | on cards | links | host attends | BatchGen, best other |
| --- | --- | --- | --- | --- | --- | --- |
"""


def rows_of(count: int, prompt: int, answer: int) -> Trace:
    """Rows that share nothing, of one length."""
    zeros = np.zeros(count, np.int32)
    offsets = np.zeros(count + 1, np.int64)
    nothing = np.empty(0, np.int32)
    return Trace(("made",), zeros, zeros + np.int32(prompt), zeros + np.int32(answer), nothing, offsets, BLOCK)


def run(trace: Trace, cost: CostModel, pool: Pool) -> SimulationReport:
    """Run the rows."""
    return simulate_trace(trace, cost, pool, Scheduling(max_running=32_768), lengths="known").report


def on_one_card() -> Iterator[str]:
    """A line of each model and workload."""
    places: tuple[Literal["host", "device"], ...] = ("host", "device")
    for model in ("mixtral-8x7b", "mixtral-8x22b", "deepseek-r1", "qwen3-30b-a3b", "qwen3-235b-a22b"):
        card = CostModel(find_shape(model), find_hardware("a5000"))
        for name, sizes in DATA.items():
            reports = []
            for place in places:
                resident = with_host_weights(card, HOST, kv=place)
                reports.append(run(rows_of(*sizes), resident.cost, pool_of(resident.cost, resident.kv_memory)))
            combined, apart = (report.seconds / 3600 for report in reports)
            tokens = [sizes[0] * (sizes[1] + sizes[2]) / report.steps for report in reports]
            ours, other = TABLE7.get((model, name), (None, None))
            paper = "" if ours is None else f"{ours}, {other or 'none'}"
            yield (
                f"| {model} | {name} | {sizes[0]:,}, {sizes[1]:,}, {sizes[2]:,} | {combined:.2f} | {apart:.1f} | "
                f"**{apart / combined:.1f}** | {tokens[0]:,.0f}, {tokens[1]:,.0f} | {paper} |"
            )


def as_the_engine_runs() -> Iterator[str]:
    """A line of each model and workload."""
    for model in ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b"):
        shape = find_shape(model)
        card = CostModel(shape, find_hardware("a5000"), law="bytes", overlap=SEQUENTIAL)
        blocks = blocks_of(shape, is_host=False)
        streamed = StreamedWeights(0, int(bytes_of_layers(shape)), HOST.link * HOST.efficiency)
        attends = streamed_cost("link", card, streamed)
        memory = card.hardware.memory - RESERVED - blocks.around - BUFFERS * blocks.size
        of_host = POOL_SHARE * (HOST.memory - shape.weight_bytes)
        running = max(RUNNING, streamed_running(shape, attends_for_device=True))
        for name, sizes in DATA.items():
            reports = [
                simulate_trace(
                    rows_of(*sizes), cost, pool_of(cost, pages), Scheduling(max_running=running), lengths="known"
                ).report
                for cost, pages in ((with_host_kv(attends, PROCESSOR), of_host), (attends, memory))
            ]
            hours = [report.seconds / 3600 for report in reports]
            tokens = [sizes[0] * (sizes[1] + sizes[2]) / report.steps for report in reports]
            yield (
                f"| {model} | {name} | {hours[0]:.2f} | {hours[1]:.1f} | **{hours[1] / hours[0]:.1f}** | "
                f"{tokens[0]:,.0f}, {tokens[1]:,.0f} |"
            )


def on_many() -> Iterator[str]:
    """A line of each size of Tables 3, 5 and 6 that the cards have room for."""
    for table, model, device, cards, count, prompt, answer, ours, other in LARGE:
        copies = max(1, cards // 64)
        cost = CostModel(find_shape(model), find_hardware(device).group(cards // copies))
        report = run(rows_of(count // copies, prompt, answer), cost, pool_of(cost, None))
        yield (
            f"| {table} | {model} | {cards} {device} | {count:,}, {prompt:,}, {answer:,} | {report.seconds / 60:.1f} | "
            f"{report.fraction_of_optimal:.3f} | {ours}, {other} |"
        )


def from_node(cost: CostModel, streamed: float, *, kv: Literal["link", "host"]) -> CostModel:
    """Return the cost where so many bytes of weights come over the links of a node, and KV too, or its host attends."""
    hardware, link = cost.hardware, NODE.link * NODE.efficiency
    reads = link if kv == "link" else NODE.bandwidth * NODE.efficiency
    seconds = max(cost.rates.weight_seconds, streamed / link)
    far = replace(
        hardware,
        bandwidth_efficiency=reads / hardware.bandwidth,
        weight_efficiency=cost.shape.weight_bytes / seconds / hardware.bandwidth,
    )
    return replace(cost, hardware=far, law="bytes" if streamed and kv == "link" else "paper")


def on_few() -> Iterator[str]:
    """A line of each size of Table 3 on 8 H20, with KV in host memory and, where there is room, on the cards."""
    places: tuple[Literal["link", "host"], ...] = ("link", "host")
    cards = find_hardware("h20").group(8)
    for model, count, prompt, answer, ours, other in SMALL:
        cost = CostModel(find_shape(model), cards)
        trace, weights = rows_of(count, prompt, answer), cost.shape.weight_bytes
        room = cards.memory - cards.cards * RESERVED
        moving = BUFFERS * blocks_of(cost.shape, is_host=False).size
        fits = weights < room
        kept = f"{run(trace, cost, pool_of(cost, None)).seconds / 60:.1f}" if fits else "no room"
        for streamed in [0.0] if fits else [weights - (room - moving), weights]:
            memory = NODE.memory * (1.0 - NODE_KEEPS) - streamed
            pools = [(far, pool_of(far, memory)) for far in (from_node(cost, streamed, kv=kv) for kv in places)]
            links, attends = (run(trace, far, pool).seconds / 60 for far, pool in pools)
            yield (
                f"| {model} | {count:,}, {prompt:,}, {answer:,} | {streamed / 1e9:,.0f} GB, "
                f"{pools[0][1].tokens // (prompt + answer):,} rows | {kept} | {links:.1f} | {attends:.1f} | "
                f"{ours}, {other or 'none'} |"
            )


def main() -> None:
    """Run all, and write the page."""
    page = ""
    sections = ((TEXT, on_one_card), (ENGINE, as_the_engine_runs), (MANY, on_many), (FEW, on_few))
    for text, lines in sections:
        page += text
        for line in lines():
            page += line + "\n"
            print(line, flush=True)
    (RESULTS / "mixtures.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    main()
