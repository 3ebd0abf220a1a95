"""Long answers in a job that is killed with SIGKILL: how many tokens are generated twice, and whether texts differ.

    python benchmarks/jobs/kills_long.py [--rows 40] [--max-tokens 1024] [--kills 5] [--seed 0]

A job runs undisturbed, once greedy and once with draws of a seed. Then the same job, on another output, is killed so
many times at random moments, evenly spread over its seconds, and ends. Tokens are counted as engines sample them, in
all processes together; those beyond the undisturbed job's were generated twice. A process may lose what it has not
kept: 5 seconds of tokens. Prints one line of JSON for each; exit status 1 where more than 2 % of the tokens and that
were generated twice, or a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from kills import answers, differences, questions, run_noting

from llmbatch.inference.answers.assembler import SECONDS_AT_RISK

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

SHARE = 0.02  # of the tokens

# The command, which notes the tokens of each step in a file that outlives it.
COMMAND = """
import os, sys
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.__main__ import command

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
append = TokenBuffers.append

def noted(self, step, *args):
    result = append(self, step, *args)
    os.write(log, f"{int(step.samples.sum())}\\n".encode())
    return result

TokenBuffers.append = noted
sys.argv[1:] = sys.argv[2:]
command()
"""


def run(command: list[str], seconds: float | None) -> tuple[bool, int, float]:
    """Run a command, and kill it so many seconds after its first step; whether it was, its tokens, its seconds."""
    killed, noted, took = run_noting(COMMAND, command, seconds)
    return killed, sum(int(tokens) for (tokens,) in noted), took


def main() -> int:
    """Kill, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill a job of long answers at random moments.")
    add = parser.add_argument
    add("--rows", type=int, default=40)
    add("--max-tokens", type=int, default=1024)
    add("--kills", type=int, default=5)
    add("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, good = np.random.default_rng(given.seed), True
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/questions.parquet"
        pq.write_table(questions(given.rows), source)
        common = ["run", source, "--model", str(smollm2()), "--prompt", "prompt", "--dtype", "float32", "--quiet"]
        common += ["--max-tokens", str(given.max_tokens), "--ignore-eos"]
        for kind, more in (("greedy", []), ("drawn", ["--temperature", "0.8", "--seed", "7"])):
            _, tokens, seconds = run([*common, *more, "--output", f"{folder}/{kind}"], None)
            command = [*common, *more, "--output", f"{folder}/{kind}-killed"]
            lives: list[tuple[bool, int, float]] = []
            while True:
                often = len(lives) < given.kills
                moment = float(rng.uniform(0.5, 1.5)) * seconds / (given.kills + 1)
                lives.append(run(command, moment if often else None))
                if not lives[-1][0]:
                    break
            kills = len(lives) - 1
            twice = sum(life[1] for life in lives) - tokens
            most = SHARE * tokens + kills * SECONDS_AT_RISK * tokens / seconds
            different = differences(answers(f"{folder}/{kind}"), answers(f"{folder}/{kind}-killed"))
            good &= kills == given.kills and twice <= most and different == 0
            shown = {"kind": kind, "rows": given.rows, "tokens": tokens, "seconds": round(seconds, 1), "kills": kills}
            shown |= {"twice": twice, "share": round(twice / tokens, 4), "most": round(most), "different": different}
            print(json.dumps(shown), flush=True)
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
