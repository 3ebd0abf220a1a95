"""What order buys on the demo dataset: `blend` against `input`, alternating in one process.

    python benchmarks/engine/orders.py [--rounds 3] [--default-rounds 2] [--json FILE]

First with the default pool, where everything fits and the plan says that order gains nothing; then with a pool of a
fifth of the KV that the job needs (distinct prompt tokens and answers). Total tokens per second are input and output
tokens over everything but loading, as `llmbatch run` reports them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch.inference.options import Options
from llmbatch.inference.report import Report
from llmbatch.inference.worker import Worker
from llmbatch.planning.order import Policy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import DATA, SYSTEM, smollm2

ORDERS: tuple[Policy, ...] = ("input", "blend")


def alternate(worker: Worker, table: pa.Table, rounds: int) -> dict[str, list[Report]]:
    """Answer the table in each order in turn; the first answer of a worker warms it up and is not counted."""
    worker.answer(table.slice(0, 8))
    reports: dict[str, list[Report]] = {order: [] for order in ORDERS}
    for number in range(rounds):
        for order in ORDERS:
            worker.options = replace(worker.options, order=order)
            report = worker.answer(table).report
            reports[order].append(report)
            print(
                f"round {number + 1} {order:6} {report.tokens_per_second:7.0f} tokens/s {report.seconds:6.1f} s, "
                f"sharing {report.prefix_sharing:.4f} of {report.prefix_sharing_optimal:.4f} "
                f"({report.prefix_sharing / report.prefix_sharing_optimal:.1%}), {report.steps} steps, "
                f"{report.preemptions} preemptions",
                flush=True,
            )
    return reports


def summarise(reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Ratios of `blend` to the `input` run beside it."""
    ratios = [
        blend.tokens_per_second / plain.tokens_per_second
        for plain, blend in zip(reports["input"], reports["blend"], strict=True)
    ]
    last = reports["blend"][-1]
    return {
        "kv_memory": last.kv_memory,
        "reason": last.reason,
        "blend_over_input": [round(ratio, 4) for ratio in ratios],
        "median": round(statistics.median(ratios), 4),
        "sharing_of_possible": round(last.prefix_sharing / last.prefix_sharing_optimal, 4),
        "input_sharing_of_possible": round(reports["input"][-1].prefix_sharing / last.prefix_sharing_optimal, 4),
        "runs": {order: [report.to_dict() for report in runs] for order, runs in reports.items()},
    }


def main() -> None:
    """Run both pools and print the ratios."""
    parser = argparse.ArgumentParser(description="Measure what order buys on the demo dataset.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--default-rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    table = pq.read_table(DATA)
    options = Options.build(model=str(smollm2()), prompt="prompt", chat=True, system=SYSTEM, sampling_params="sampling")
    worker = Worker.open(options)
    worker.load()
    print(f"default pool: {worker.pool.tokens:,} tokens")
    roomy = summarise(alternate(worker, table, arguments.default_rounds))
    run = roomy["runs"]["blend"][-1]
    need = round(run["input_tokens"] * (1 - run["prefix_sharing_optimal"])) + run["output_tokens"]
    tight_bytes = need // 5 * worker.model.bytes_per_token
    print(f"KV needed: {need:,} tokens, {need * worker.model.bytes_per_token:,} bytes; a fifth: {tight_bytes:,} bytes")
    del worker
    tight_worker = Worker.open(replace(options, kv_memory=tight_bytes))
    tight = summarise(alternate(tight_worker, table, arguments.rounds))
    for name, result in (("default pool", roomy), ("a fifth", tight)):
        print(
            f"{name}: blend over input {result['median']:.3f} (median of {result['blend_over_input']}), "
            f"sharing {result['sharing_of_possible']:.1%} of the possible "
            f"(input {result['input_sharing_of_possible']:.1%}); {result['reason']}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"default": roomy, "fifth": tight}, indent=1))


if __name__ == "__main__":
    main()
