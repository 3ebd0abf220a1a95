"""A rollout of long-tailed answers by the clock: the last rows left where they are, or split over more devices.

    python benchmarks/clock/rollouts.py [--seeds 1,2,3]

Writes docs/results/rollouts.md: what is run is said there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Literal, NamedTuple

import numpy as np
from harness.simulations import RESULTS
from numpy.typing import NDArray

from llmbatch.perf_model.collectives import LATENCY
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.even_ends import JOIN_SECONDS

Floats = NDArray[np.float64]

SHAPE, CARD = find_shape("deepseek-r1"), find_hardware("h20")
DEVICES, OF_NODE = 16, 8
ROWS, PROMPT = 256, 1024
FIXED = 0.025  # s, that a slower step takes more
LAST = 8  # rows, of which the paper splits what is left
NODE_LINK, FAR_LINK = 450e9, 25e9  # bytes/s of a card in its node, and to another one (200 Gb/s)
LENGTHS = ((6000, 1.0, 131_072), (4000, 1.2, 131_072), (3000, 1.4, 131_072))  # median, sigma, the longest
TEXT = """# A rollout whose last rows are long: by the clock

Written by `python benchmarks/clock/rollouts.py`. BatchGen (6.3) runs rollouts of 256 rows of DeepSeek-R1 on 16 H20: 16
rows a device, experts over all devices. When at most 8 rows are left, of more than 40,000 tokens each, it splits them
over idle devices and decodes in 8 bits, and rollouts take 5 to 10 % less. It says that these rows take 30 to 80 % of
the time, and does not give their lengths. **Lengths are assumed here**: log-normal (median, sigma, cut at 131,072
tokens), dealt to devices in turn as they are drawn, with prompts of 1,024. So the last 8 rows are those of
{longest}, by the draw. Nothing here ran on a GPU.

**The clock.** All devices take a step together, part after part. What every token passes (15 GB of weights of 1 byte,
and the head) is on each device, and takes the longer of its reading and of its products for the rows there. A device
reads the KV of its rows; the one with most rows decides. Experts: n tokens touch 1 - (1 - 8 / 256)^n of them, and the
device that has most of those decides; each takes the longer of its reading and of a tile of 64 rows at the 16-bit rate
([decision 0112](../decisions/0112-tiles-of-experts.md)). Each layer has two exchanges of 10 us and of hidden states, at
25 GB/s a card between nodes. Rates are .75 and .85 of the card's peaks.

What is done with the last 8 rows, with 7.5 s for it but for *moved*:

- *moved*: each to a device of its own. Experts lie on one device each, so they are read once already, wherever rows
  are.
- *attention*: what every token passes and KV is split over 16 devices, by positions; experts stay. A sum a layer more.
- *8 heads*, *16 heads*: all is split over the devices of a node or of both, attention by heads. Each device then reads
  all of the latent KV, which heads share. Two sums a layer, in a node at 450 GB/s.
- *8 spread*, *16 spread*: the same, but KV is split by positions.
- *8 bits*: *16 spread*, with products at twice the rate.
- *best*: *16 spread*, from as many rows on as is best (a power of two).
- *slower*: *attention*, where each step takes 25 ms more, which nothing shortens: launches, the host, links. That
  figure is chosen for what it shows, not known.

"""
STEP = """A step of 8 rows, each on a device of its own, that have 48,000 tokens, in ms:

| | what every token passes | KV | experts | links | all |
| --- | --- | --- | --- | --- | --- |
"""
GAINS = """
Seconds of rollouts whose rows are left where they are, the share of them with 8 rows or fewer, and the share by which
they are shorter with the rest; of *best*, from how many rows on:

| lengths | seed | s | last 8 | moved | attention | 8 heads | 16 heads | 8 spread | 16 spread | 8 bits | best | slower |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
FOUND = """
By these draws rollouts are shorter by {spread} with *16 spread*, by {bits} with *8 bits*,
by {attention} with *attention*, and by {moved} with *moved*. The paper says 5 to 10 %. *slower* is {slower}.
Splitting gains most from {rows} rows on. By decision [0090](../decisions/0090-even-ends.md) predicted seconds decide
that, and not a number of rows.

Experts are {experts} of a step of 8 rows: each takes a tile for one or two rows. With tiles of 16 rows in place of
{tile} they would be {of_16}, and what attention takes would count for more; the tile is taken, not measured. Heads
share latent KV, so splitting by heads makes each device read all of it. Memory was not looked at: on the 8 devices of
a node the weights leave 63 GB, or 900,000 tokens of KV.

llmbatch does not do this. Its engines join whole copies of a model, and its ranks split KV by heads.
"""


class Moment(NamedTuple):
    """Steps; float64 [steps] each."""

    rows: Floats  # that are decoded
    most: Floats  # of them, on the device that has most
    context: Floats  # tokens of each


@dataclass(frozen=True, slots=True)
class Layout:
    """How what a step passes lies on devices."""

    devices: int = DEVICES
    dense: Literal["copied", "split"] = "copied"
    kv: Literal["by rows", "by heads", "spread"] = "by rows"
    experts: Literal["whole", "split"] = "whole"
    exchanges: int = 2  # of a layer, with the devices of a token's experts
    sums: int = 0  # of a layer, over all devices
    link: float = FAR_LINK  # bytes/s
    rate: float = 1.0  # of products, over the 16-bit one
    tile: int = CARD.expert_tile  # rows that an expert's products take at least

    def parts(self, steps: Moment) -> Floats:
        """Predict the seconds of what every token passes, of KV, of experts and of links; float64 [4, steps]."""
        shared = self.devices if self.dense == "split" else 1
        rows = steps.rows if self.dense == "split" else steps.most
        flops, speed = CARD.flops * self.rate, CARD.weight_bytes_per_second
        always = SHAPE.weight_bytes - SHAPE.expert_bytes - SHAPE.bytes_around + SHAPE.head_bytes
        chosen = SHAPE.expert_params * SHAPE.experts_chosen / SHAPE.experts
        products = 2.0 * (SHAPE.params - chosen + SHAPE.head_params) * rows / flops
        dense = np.maximum(always / speed, products) / shared
        held = {"by rows": steps.most, "by heads": steps.rows, "spread": steps.rows / self.devices}[self.kv]
        kv = held * steps.context * SHAPE.kv_bytes_per_token / CARD.bytes_per_second
        tile = 2.0 * self.tile * SHAPE.expert_params / flops
        each = max(SHAPE.expert_bytes / speed, tile) / SHAPE.experts  # of every layer
        touched = 1.0 - (1.0 - SHAPE.experts_chosen / SHAPE.experts) ** steps.rows
        experts = most_of_a_device(touched) if self.experts == "whole" else SHAPE.experts * touched / self.devices
        sent = SHAPE.hidden_size * 2.0 * (self.exchanges * steps.most + self.sums * 2.0 * steps.rows)
        links = SHAPE.layers * ((self.exchanges + self.sums) * LATENCY + sent / self.link)
        return np.stack(np.broadcast_arrays(dense, kv, experts * each, links))

    def seconds(self, steps: Moment) -> Floats:
        """Predict the seconds of steps."""
        total: Floats = self.parts(steps).sum(axis=0)
        return total


def most_of_a_device(touched: Floats) -> Floats:
    """Count the experts that are touched on the device that has most of those, in the mean."""
    held = SHAPE.experts // DEVICES
    distinct, places = np.unique(touched, return_inverse=True)
    counts = np.arange(held + 1)
    chance = np.array([comb(held, k) for k in counts]) * np.power.outer(distinct, counts)
    chance *= np.power.outer(1.0 - distinct, held - counts)
    means: Floats = (1.0 - np.cumsum(chance, axis=1)[:, :-1] ** DEVICES).sum(axis=1)
    return means[places]


LEFT = Layout()
NODE = Layout(OF_NODE, "split", "by heads", "split", exchanges=0, sums=2, link=NODE_LINK)
BOTH = replace(NODE, devices=DEVICES, link=FAR_LINK)
LAYOUTS = {
    "left": LEFT,
    "attention": replace(LEFT, dense="split", kv="spread", sums=1),
    "8 heads": NODE,
    "16 heads": BOTH,
    "8 spread": replace(NODE, kv="spread"),
    "16 spread": replace(BOTH, kv="spread"),
    "8 bits": replace(BOTH, kv="spread", rate=2.0),
}


def steps_of(lengths: NDArray[np.int64]) -> Moment:
    """Return the steps of rows [rows] that are dealt to devices in turn."""
    ends = np.stack([np.bincount(lengths[one::DEVICES], minlength=lengths.max() + 1) for one in range(DEVICES)])
    left = ends.sum(axis=1, keepdims=True) - np.cumsum(ends, axis=1)[:, :-1]  # after so many tokens
    context = PROMPT + np.arange(left.shape[1], dtype=np.float64)
    return Moment(left.sum(axis=0).astype(np.float64), left.max(axis=0).astype(np.float64), context)


class Gains(NamedTuple):
    """A rollout: seconds where rows are left, and shares of these."""

    seconds: float
    tail: float  # with 8 rows or fewer
    moved: float
    split: dict[str, float]  # by layout
    best: float
    rows: int  # from which on `best` is gained
    slower: float

    def cells(self) -> str:
        """Write a line of the table, without what was drawn."""
        shares = " | ".join(f"{one:.1%}" for one in (self.moved, *self.split.values()))
        best = f"{self.best:.1%} ({self.rows})"
        return f"{self.seconds:,.0f} | {self.tail:.0%} | {shares} | {best} | {self.slower:.1%}"


def gains_of(steps: Moment) -> Gains:
    """Return what each layout gains in a rollout."""
    left = LEFT.seconds(steps)
    prompts = CostModel(SHAPE, CARD.group(DEVICES)).request_compute(np.full(ROWS, PROMPT), 1.0)
    all_left = float(left.sum() + prompts.sum())

    def gain(seconds: Floats, last: int = LAST, joining: float = JOIN_SECONDS) -> float:
        saved = float((left - seconds)[steps.rows <= last].sum()) - joining
        return saved / all_left

    tail = float(left[steps.rows <= LAST].sum()) / all_left
    moved = gain(LEFT.seconds(steps._replace(most=np.ceil(steps.rows / DEVICES))), joining=0.0)
    taken = {name: layout.seconds(steps) for name, layout in LAYOUTS.items() if name != "left"}
    spread = taken["16 spread"]
    best, rows = max((gain(spread, 1 << power), 1 << power) for power in range(ROWS.bit_length()))
    split = {name: gain(seconds) for name, seconds in taken.items()}
    slower = split["attention"] * all_left / (all_left + FIXED * len(left))
    return Gains(all_left, tail, moved, split, best, rows, slower)


def found(gains: Sequence[Gains], last: Moment) -> str:
    """Say what was found in these rollouts, and in a step of the last rows."""
    of_tile, of_16 = (layout.parts(last)[:, 0] for layout in (LEFT, replace(LEFT, tile=16)))
    return FOUND.format(
        spread=_span([one.split["16 spread"] for one in gains]),
        bits=_span([one.split["8 bits"] for one in gains]),
        attention=_span([one.split["attention"] for one in gains]),
        moved=_span([one.moved for one in gains]),
        slower=_span([one.slower for one in gains]),
        rows=" or ".join(map(str, sorted({one.rows for one in gains}))),
        experts=_span([of_tile[2] / of_tile.sum()]),
        of_16=_span([of_16[2] / of_16.sum()]),
        tile=LEFT.tile,
    )


def _span(shares: Sequence[float]) -> str:
    """Write the least and the largest share."""
    least, largest = (f"{100 * one:.0f}" for one in (min(shares), max(shares)))
    return f"{largest} %" if least == largest else f"{least} to {largest} %"


def main() -> None:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description="Compare what is done with the last rows of a rollout.")
    parser.add_argument("--seeds", default="1,2,3", help="of the lengths that are drawn")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    last = Moment(*(np.array([one]) for one in (float(LAST), 1.0, 48_000.0)))
    page = STEP
    for name, layout in LAYOUTS.items():
        parts = 1e3 * layout.parts(last)[:, 0]
        page += f"| {name} | {' | '.join(f'{part:.1f}' for part in (*parts, parts.sum()))} |\n"
    page += GAINS
    gains, longest = [], []
    for median, sigma, most in LENGTHS:
        for seed in seeds:
            drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, ROWS)
            lengths = np.clip(drawn, 1, most).astype(np.int64)
            gains.append(gains_of(steps_of(lengths)))
            longest.append(np.sort(lengths)[-LAST - 1])
            page += f"| {median:,}, {sigma} | {seed} | {gains[-1].cells()} |\n"
    of = f"more than {round(min(longest), -3):,} to {round(max(longest), -3):,} tokens"
    page = TEXT.format(longest=of) + page + found(gains, last)
    print(page)
    (RESULTS / "rollouts.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
