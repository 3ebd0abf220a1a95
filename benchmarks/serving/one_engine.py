"""What it costs and gains a job to have no engine of its own: `llmbatch run --beside` against `llmbatch run`.

    python benchmarks/serving/one_engine.py idle [--rounds 3] [--rows 360]
    python benchmarks/serving/one_engine.py guests [--rounds 3] [--rows 360] [--rate .25] [--tpot .3] [--ttft .5]

`idle`: nobody else is at the endpoint. A round is the job in an engine of its own and the same job at the endpoint, one
after the other; the ratio is that of their tokens per second.

`guests`: people ask the endpoint meanwhile, as in `endpoint.py`. A round is the job in an engine of its own, which
shares the cores with the endpoint, and the same job at the endpoint. The ratios are of one engine over two: the 99th
percentile of first tokens, of the guests of all rounds, and the seconds of the job in each round.

Which comes first changes from round to round. Prompts begin with the number of the round, those of guests with the
number of the run, so that no pages of an earlier one are found. Before the first round both answer a few rows. Prints
a line of JSON a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from endpoint import Figures, Waited, endpoint, guests, job, summary

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from mixes import rows_of
from rounds import demo_model

SIDES = ("two", "one")  # engines; as job: of its own, at the endpoint
WARM = 12  # rows


def write_job(folder: Path, number: int, rows: list[tuple[str, int]]) -> Path:
    """Write the rows of a round."""
    source = folder / f"{number}.parquet"
    sampling = [json.dumps({"max_tokens": tokens, "ignore_eos": True}) for _, tokens in rows]
    pq.write_table(
        pa.table({"prompt": [f"Round {number}. {prompt}" for prompt, _ in rows], "sampling": sampling}), source
    )
    return source


async def among_guests(
    model: str, source: Path, url: str, side: str, rate: float, prompts: list[str]
) -> tuple[Figures, list[Waited]]:
    """Run the job while guests arrive at the endpoint."""
    over = asyncio.Event()
    arriving = asyncio.create_task(guests(url, rate, over, prompts, f"Guest of {source.stem}, {side},"))
    figures = await job(model, source, url if side == "one" else None)
    over.set()
    return figures, await arriving


def measure(options: argparse.Namespace) -> None:
    """Run all rounds, and print the ratios."""
    model, rows = demo_model(), rows_of("demo")
    prompts = [prompt for prompt, _ in rows]
    rows = rows[:: max(1, len(rows) // options.rows)]
    tpot = options.tpot if options.what == "guests" else None
    ratios: list[float] = []
    waited: dict[str, list[Waited]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder, endpoint(model, options.ttft, tpot) as url:
        warm = write_job(Path(folder), options.rounds, rows[:WARM])
        for side in SIDES:
            asyncio.run(job(model, warm, url if side == "one" else None))
        for number in range(options.rounds):
            source = write_job(Path(folder), number, rows)
            seconds = {}
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                if options.what == "idle":
                    figures = asyncio.run(job(model, source, url if side == "one" else None))
                else:
                    figures, found = asyncio.run(among_guests(model, source, url, side, options.rate, prompts))
                    waited[side] += found
                    figures |= summary(found)
                seconds[side] = figures["seconds"]
                print(number, side, json.dumps(figures), flush=True)
            ratios.append(
                seconds["two"] / seconds["one"] if options.what == "idle" else seconds["one"] / seconds["two"]
            )
    what = "speed at the endpoint over alone" if options.what == "idle" else "seconds with one engine over two"
    print(f"{what}: median {statistics.median(ratios):.3f} of {[round(ratio, 3) for ratio in ratios]}")
    if options.what == "guests":
        late = {side: float(np.quantile([first for first, _ in waited[side]], 0.99)) for side in SIDES}
        told = f"{late['one'] / late['two']:.3f}, {late['one']:.3f} s over {late['two']:.3f} s"
        print(f"99th percentile of first tokens, one engine over two: {told}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description="Measure a job at an endpoint against one with an engine of its own.")
    parser.add_argument("what", choices=("idle", "guests"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=360, help="of the demo dataset in each job, about")
    parser.add_argument("--rate", type=float, default=0.25, help="guests a second")
    parser.add_argument("--tpot", type=float, default=0.3, help="seconds that a step may take where there are guests")
    parser.add_argument("--ttft", type=float, default=0.5, help="seconds within which a first token is wanted")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
