"""Jobs of every kind killed at sampled file operations: rows lost, rows twice, jobs that do not go on.

    python benchmarks/jobs/kills_at.py [--operations 1000] [--seed 0]

Each kill is a SIGKILL before, after or in the middle of a file operation, all of a job's being as likely, in one of
the set-ups of `tests.support.setups`: folders, Parquet and JSONL; with ids and without order; changed inputs, rows that
failed; `--restart` and `--overwrite` over what is finished, begun or foreign. Three in ten are killed twice. The plain
command, or the same one, then goes on, and its output is compared with that of a job nobody disturbed. Until a new
output is complete, the one that it replaces must be there. Prints a line of JSON; exit status 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.models import tiny_model_folder
from tests.support.setups import SETUPS, Case, Failure, warm_up
from tests.support.tokenizers import CHAT_TEMPLATE


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, go on, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill jobs at sampled file operations.")
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the jobs lie (a temporary folder)")
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(given.seed)
    failures: list[str] = []
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        model = tiny_model_folder(folder / "model", "llama", chat_template=CHAT_TEMPLATE)
        warm_up(model, folder)
        cases: dict[int, Case] = {}
        for number, at in enumerate(rng.integers(len(SETUPS), size=given.operations).tolist()):
            try:
                if at not in cases:
                    cases[at] = Case(SETUPS[at], model, folder / str(at))
                cases[at].run(rng)
            except Failure as failure:
                failures.append(str(failure))
                print(failure, file=sys.stderr, flush=True)
            if number % 50 == 49:
                print(f"{number + 1} kills, {len(failures)} failures", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "kills": given.operations,
                "setups": len(cases),
                "seed": given.seed,
                "failures": failures,
                "seconds": round(time.perf_counter() - begun, 1),
            }
        )
    )
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
