"""What a model split over two ranks of one thread each does, over one process of two threads.

    python benchmarks/peers/second_family.py FOLDER
    python benchmarks/engine/tensor_parallel.py FOLDER [--rows 64] [--max-tokens 24] [--rounds 2]

The model of FOLDER answers the same rows in float32, greedily, each side in a fresh process, in turns. Tokens per
second are those of prompts and answers. Weights are the bytes that a process holds once they are packed. A sum is that
of [rows, hidden] float32 over two ranks. The table goes to docs/results/tensor-parallel.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.ranks import shared_file

RESULT: Final = Path(__file__).parents[2] / "docs" / "results" / "tensor-parallel.md"
SUMMED_ROWS: Final = (1, 64, 512)
REPEATS: Final = 100
NEEDED: Final = {"equal": ">= .98", "weights": "<= .55", "speed": ">= .85"}


def answer(folder: str, ranks: int, rows: int, max_tokens: int) -> dict[str, Any]:
    """Answer the rows in this process."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))
    from run import DATA

    from llmbatch import LLMOperator

    table = pq.read_table(DATA).slice(0, rows)
    options: dict[str, Any] = {"model": folder, "prompt": "prompt", "dtype": "float32", "kv_memory": 2**29}
    operator = LLMOperator(**options, max_tokens=max_tokens, ignore_eos=True, tensor_parallel=ranks)
    operator(pa.table({"prompt": ["The weather today is", "In the year 2000"]}))
    begun = time.perf_counter()
    out = operator(table)
    seconds = time.perf_counter() - begun
    assert out["error"].null_count == len(out), out["error"]
    tokens = sum(sum(out[name].to_pylist()) for name in ("num_input_tokens", "num_generated_tokens"))
    return {"speed": tokens / seconds, "tokens": tokens, "texts": out["generated_text"].to_pylist()}


def weights(folder: str, ranks: int) -> int:
    """Load the share of the first rank, and count its bytes."""
    from llmbatch.engine.cpu.platform import HOST
    from llmbatch.engine.model.loader import load_model
    from llmbatch.engine.ranks.cpu.collectives import HostCollectives
    from llmbatch.engine.ranks.cpu.shares import HostShare, weight_bytes

    share = HostShare(HostCollectives(0, ranks), threads=1)
    platform = replace(HOST, share=share, pack=share.pack)
    return weight_bytes(load_model(folder, dtype="float32", platform=platform).module)


def time_sums(rank: int, memory: int, hidden: int) -> dict[int, float]:
    """Time sums over two ranks, of which this process is one; seconds by rows."""
    import torch

    from llmbatch.engine.ranks.cpu.collectives import HostCollectives
    from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory

    torch.set_num_threads(1)
    ranks = HostCollectives(rank, 2)
    ranks.join(SharedMemory(memory, rank, 2))
    took = {}
    for rows in SUMMED_ROWS:
        x = torch.ones(rows, hidden)
        begun = time.perf_counter()
        for _ in range(REPEATS):
            ranks.sum(x)
        took[rows] = (time.perf_counter() - begun) / REPEATS
    return took


def start(*arguments: object, files: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Start this script for one figure; it has these open files."""
    command = [sys.executable, __file__, "--only", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=files, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    """Wait for its figure."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed")
    return json.loads(out.splitlines()[-1])


def compare(folder: str, rows: int, max_tokens: int, rounds: int) -> str:
    """Measure all, and return the page."""
    found: dict[int, list[Any]] = {1: [], 2: []}
    for turn in range(rounds):
        for ranks in (1, 2) if turn % 2 == 0 else (2, 1):
            found[ranks].append(result_of(start("answer", folder, ranks, rows, max_tokens)))
            print(ranks, f"{found[ranks][-1]['speed']:.1f} tokens/s", file=sys.stderr, flush=True)
    speeds = {ranks: statistics.median(one["speed"] for one in every) for ranks, every in found.items()}
    spread = {ranks: [round(one["speed"], 1) for one in every] for ranks, every in found.items()}
    texts = [found[ranks][0]["texts"] for ranks in (1, 2)]
    equal = sum(a == b for a, b in zip(*texts, strict=True)) / rows
    held = {ranks: result_of(start("weights", folder, ranks)) for ranks in (1, 2)}
    hidden = json.loads((Path(folder) / "config.json").read_text())["hidden_size"]
    with shared_file(2) as memory:
        pair = [start("time_sums", rank, memory, hidden, files=[memory]) for rank in (0, 1)]
        sums, _ = (result_of(process) for process in pair)
    tokens = found[1][0]["tokens"]
    lines = [
        "# A model split over two ranks",
        "",
        "Written by `benchmarks/engine/tensor_parallel.py`, which says what is measured. Two cores; one process of two",
        f"threads beside two ranks of one thread. {rows} rows, {tokens:,} tokens with answers, float32.",
        "",
        "| | one process | two ranks | ratio | needed |",
        "|---|---|---|---|---|",
        f"| rows with the same text | | | {equal:.3f} | {NEEDED['equal']} |",
        f"| bytes of weights | {held[1]:,} | {held[2]:,} | {held[2] / held[1]:.3f} | {NEEDED['weights']} |",
        f"| tokens/s | {speeds[1]:.1f} | {speeds[2]:.1f} | {speeds[2] / speeds[1]:.3f} | {NEEDED['speed']} |",
        "",
        f"Tokens/s of each round: {spread[1]} and {spread[2]}.",
        "",
        f"| rows of a sum, of {hidden} elements | microseconds |",
        "|---|---|",
        *(f"| {count} | {1e6 * float(seconds):.0f} |" for count, seconds in sums.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one figure, or all."""
    if sys.argv[1] == "--only":
        name, *given = sys.argv[2:]
        made: Any = {"answer": answer, "weights": weights, "time_sums": time_sums}[name]
        print(json.dumps(made(*(int(one) if one.isdigit() else one for one in given))))
        return
    parser = argparse.ArgumentParser(description="Measure two ranks against one process.")
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    page = compare(asked.folder, asked.rows, asked.max_tokens, asked.rounds)
    RESULT.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
