"""Long answers in a job that is asked to end at once: how soon it does, and how many tokens are generated twice.

    python benchmarks/jobs/stops_long.py [--rows 40] [--max-tokens 1024] [--stops 5] [--seed 0] [-- OPTION ...]

A job runs undisturbed. Then the same job, on another output, gets SIGTERM with `--grace 0` so many times at random
moments, evenly spread over its seconds, and ends. It is to end within 2 seconds each time, and nothing that was decoded
is decoded again. Tokens are counted as engines sample them, in all processes together. Options behind `--` are those of
`llmbatch run`. Prints one line of JSON; exit status 1 where one of these does not hold, or a text differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from kills import answers, differences, questions, run_noting
from kills_long import COMMAND, run

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

MOST = 2.0  # seconds to the end


def stop(command: list[str], seconds: float) -> tuple[bool, int, float]:
    """Run a command, stop it so long after its first step; whether it was, its tokens, and seconds to its end."""
    stopped, noted, took = run_noting(COMMAND, command, seconds, signal.SIGTERM)
    return stopped, sum(int(tokens) for (tokens,) in noted), took - seconds


def main() -> int:
    """Stop, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Ask a job of long answers to end at once, at random moments.")
    add = parser.add_argument
    add("--rows", type=int, default=40)
    add("--max-tokens", type=int, default=1024)
    add("--stops", type=int, default=5)
    add("--seed", type=int, default=0)
    add("options", nargs="*", help="of llmbatch run, behind --")
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/questions.parquet"
        pq.write_table(questions(given.rows), source)
        common = ["run", source, "--model", str(smollm2()), "--prompt", "prompt", "--dtype", "float32", "--quiet"]
        common += ["--max-tokens", str(given.max_tokens), "--ignore-eos", "--grace", "0", *given.options]
        _, tokens, seconds = run([*common, "--output", f"{folder}/whole"], None)
        command = [*common, "--output", f"{folder}/stopped"]
        generated, ends = 0, []
        for _ in range(given.stops):
            moment = float(rng.uniform(0.5, 1.5)) * seconds / (given.stops + 1)
            stopped, sampled, took = stop(command, moment)
            generated += sampled
            ends += [took] if stopped else []
        generated += run(command, None)[1]
        different = differences(answers(f"{folder}/whole"), answers(f"{folder}/stopped"))
    shown = {"rows": given.rows, "tokens": tokens, "seconds": round(seconds, 1), "twice": generated - tokens}
    shown |= {"to_the_end": [round(took, 2) for took in ends], "different": different}
    print(json.dumps(shown), flush=True)
    return int(len(ends) < given.stops or max(ends) > MOST or generated != tokens or different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
