"""What the journal costs on the demo job: its share of the job's time, and rounds with and without it.

The job runs as `make demo` runs it. In rounds without, `Journal.append` returns at once; all else is the same. The
share is the time spent in `append`, by the thread that writes, over the job's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import llmbatch
from llmbatch.storage.journal import Journal
from llmbatch.storage.location import Location

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import DATA, SYSTEM, smollm2

LOCAL: Any = type(Journal.open(Location.at("."), "none"))  # a journal on a disk


def run(folder: str, append: Any) -> tuple[float, float, int]:
    """Seconds of a job, of these seconds those in `append`, and its calls."""
    spent, calls = 0.0, 0

    def timed(self: Journal, batch: pa.RecordBatch) -> None:
        nonlocal spent, calls
        begun = time.perf_counter()
        append(self, batch)
        spent += time.perf_counter() - begun
        calls += 1

    original, LOCAL.append = LOCAL.append, timed
    try:
        report = llmbatch.run(
            str(DATA),
            f"{folder}/out",
            model=str(smollm2()),
            prompt="prompt",
            chat=True,
            system=SYSTEM,
            sampling_params="sampling",
        )
    finally:
        LOCAL.append = original
    return report.seconds, spent, calls


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds, spent, calls = run(f"{folder}/with", LOCAL.append)
            without, _, _ = run(f"{folder}/without", lambda journal, batch: None)
        one = {"seconds": seconds, "journal_seconds": spent, "records": calls, "seconds_without": without}
        rounds.append({**one, "share": spent / seconds, "ratio": seconds / without})
        print(rounds[-1], file=sys.stderr)
    print(json.dumps({"rounds": rounds, "share": max(one["share"] for one in rounds)}))


if __name__ == "__main__":
    main()
