"""`import llmbatch` in fresh processes: the median of ten, which must stay under 0.3 s.

    python benchmarks/engine/import_time.py

Exit status 1 where it does not.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

LIMIT = 0.3  # seconds
RUNS = 10
PROGRAM = "import time; begun = time.perf_counter(); import llmbatch; print(time.perf_counter() - begun)"


def seconds() -> float:
    """Seconds of one import in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> int:
    """Print the median and the range; returns the exit status."""
    times = [seconds() for _ in range(RUNS)]
    median = statistics.median(times)
    print(
        f"import llmbatch: median {median:.4f} s of {RUNS} (least {min(times):.4f}, most {max(times):.4f}, "
        f"limit {LIMIT})"
    )
    return int(median >= LIMIT)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    raise SystemExit(main())
