"""Two actors of one core each on Ray, one of which is given all the long rows: seconds with and without moves.

    python benchmarks/jobs/even_ends_ray.py [--rows 64] [--long 512] [--short 16] [--rounds 2] [--lengths unknown]

Half of the rows share one prefix and answer `--long` tokens, the others share another one and answer `--short`. The
model is SmolLM2-135M in float32. `map_dataset` cuts shards that are alike, so here the cut is made by hand: all long
rows are one actor's. Each actor is pinned to a core of its own, with one thread. Rounds run in turn, without moves and
with them, each in a Ray of its own. Seconds are those from when both actors have loaded the model until the last row is
there: what a Ray takes to start is the same for both.

Lengths are `known` where rows ignore the end of the text, and `unknown` where rows may not end before their last token,
which nothing but their answers tells. Prints one line of JSON for each run, and one for all; exit status 1 where an
answer differs, or the mean of the runs with moves takes more than .70 of the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

from llmbatch import LLMOperator
from llmbatch.operators.ray import dataset as operators_ray
from llmbatch.operators.ray.sharding import Shards

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

MOST = 0.70  # of the seconds without moves
LOADED = "loaded"  # name of the files that actors write when they have loaded


def table_of(given: argparse.Namespace) -> pa.Table:
    """The rows, long ones first."""
    prompts, params = [], []
    for tokens, subject in ((given.long, "rivers"), (given.short, "lamps")):
        for i in range(given.rows):
            prompts.append(f"Here is one of many questions about {subject}. " * 8 + f"Question {i}:")
            ends = {"ignore_eos": True} if given.lengths == "known" else {"min_tokens": tokens}
            params.append({"max_tokens": tokens, **ends})
    return pa.table({"id": np.arange(2 * given.rows), "prompt": prompts, "params": pa.array(params)})


def by_length(long: int) -> Callable[..., Shards]:
    """A cut of rows into two shards: those that answer so many tokens, and others."""

    def cut(outlines: pa.Table, *_: Any, **__: Any) -> Shards:
        rows, tokens = outlines["row"].to_numpy(), outlines["max_tokens"].to_numpy()
        order = np.argsort(rows)
        return Shards(2, rows[order], (tokens[order] != long).astype(np.int32))

    return cut


def prepared(folder: str, moves: bool) -> Callable[[], None]:
    """What each process of Ray does first. A function in a function is sent whole, not by its name."""

    def prepare() -> None:
        import torch

        from llmbatch.inference.worker import Worker
        from llmbatch.operators.ray import dataset
        from llmbatch.operators.ray.actor import SharedEngine
        from llmbatch.operators.ray.lending.exchange import RowExchange

        begin, run, load = dataset._Actor.__init__, SharedEngine._run, Worker.load

        def pinned(self: Any, *args: Any, **kwargs: Any) -> None:
            for core in sorted(os.sched_getaffinity(0)):
                try:
                    os.close(os.open(f"{folder}/core-{core}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.sched_setaffinity(0, {core})
                break
            begin(self, *args, **kwargs)

        def alone(self: Any) -> None:
            torch.set_num_threads(1)
            run(self)

        def noted(self: Any) -> Any:
            loaded = load(self)
            if not Path(folder, f"loaded-{os.getpid()}").exists():
                Path(folder, f"loaded-{os.getpid()}").touch()
            return loaded

        dataset._Actor.__init__ = pinned  # type: ignore[method-assign]
        SharedEngine._run = alone  # type: ignore[method-assign]
        Worker.load = noted  # type: ignore[method-assign]
        if not moves:
            RowExchange._match = lambda self, now: None  # type: ignore[method-assign]

    return prepare


def answer(table: pa.Table, given: argparse.Namespace, moves: bool) -> tuple[pa.Table, dict[str, Any]]:
    """The table with its answers, by id, and figures."""
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            address="local",
            num_cpus=6,
            log_to_driver=False,
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": prepared(folder, moves)},
        )
        context: Any = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.wait_for_min_actors_s = 600
        ledgers: list[Any] = []
        module: Any = operators_ray
        start, cut = module.start_ledger, module.cut

        def started(*args: Any) -> Any:
            ledgers.append(start(*args))
            return ledgers[0]

        module.start_ledger, module.cut = started, by_length(given.long)
        try:
            op: Any = LLMOperator(
                model=str(smollm2()),
                prompt="prompt",
                sampling_params="params",
                temperature=0.0,
                dtype="float32",
                kv_memory=1 << 31,
            )
            answered = operators_ray.map_dataset(ray.data.from_arrow(table), op, concurrency=2, num_cpus=1, quiet=True)
            found = pa.concat_tables(ray.get(answered.to_arrow_refs())).sort_by("id")
            ended = time.time()
            moved = ray.get(ledgers[0].moved.remote())
            loaded = max(file.stat().st_mtime for file in Path(folder).glob("loaded-*"))
        finally:
            module.start_ledger, module.cut = start, cut
            ray.shutdown()
    return found, {"moves": moves, "seconds": round(ended - loaded, 2), "rows_moved": moved}


def main() -> int:
    """Run, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Two actors on Ray that end together.")
    add = parser.add_argument
    add("--rows", type=int, default=64)
    add("--long", type=int, default=512)
    add("--short", type=int, default=16)
    add("--rounds", type=int, default=2)
    add("--lengths", choices=["known", "unknown"], default="known")
    given = parser.parse_args()
    table = table_of(given)
    runs: dict[bool, list[float]] = {False: [], True: []}
    texts, different = None, 0
    for _ in range(given.rounds):
        for moves in (False, True):
            with redirect_stdout(sys.stderr):
                found, figures = answer(table, given, moves)
            texts = texts or found["generated_text"].to_pylist()
            different += sum(a != b for a, b in zip(texts, found["generated_text"].to_pylist(), strict=True))
            runs[moves].append(figures["seconds"])
            print(json.dumps(figures), flush=True)
    ratio = float(np.mean(runs[True]) / np.mean(runs[False]))
    pairs = [round(with_moves / without, 3) for without, with_moves in zip(runs[False], runs[True], strict=True)]
    print(json.dumps({"lengths": given.lengths, "ratio": round(ratio, 3), "ratios": pairs, "different": different}))
    return int(different > 0 or ratio > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
