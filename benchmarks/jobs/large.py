"""An input larger than memory: 5 GB of documents through a whole job with the simulated engine in 2 GiB.

Where this process may make a control group of memory (Linux, root), the job runs in one and is killed by the system if
it takes more, the cache of its files counted in. Elsewhere its resident set is only looked at. Exit status 1 where
either was larger, or where rows are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

DOCUMENT = 4000  # characters of each row
LIMIT = 2 << 30  # bytes
_ROWS = 10_000  # written at once
_GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # of the first and the second version


def write(path: Path, rows: int) -> None:
    """Short prompts beside documents that do not compress."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz012345", np.uint8)
    schema = pa.schema([("doc", pa.string()), ("text", pa.string()), ("tokens", pa.int32())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, rows, _ROWS):
            count = min(_ROWS, rows - first)
            data = letters[rng.integers(0, 32, count * DOCUMENT, np.uint8)]
            offsets = np.arange(count + 1, dtype=np.int32) * DOCUMENT
            docs = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))
            texts = [f"Is review {i} of topic {i % 997} positive or negative?" for i in range(first, first + count)]
            tokens = rng.integers(1, 64, count).astype(np.int32)
            writer.write_table(pa.table({"doc": docs, "text": texts, "tokens": tokens}, schema=schema))


@contextmanager
def limited() -> Iterator[Path | None]:
    """A control group of `LIMIT` bytes; None where none can be made."""
    for root, name in zip(_GROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = root / f"llmbatch-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(LIMIT))
            yield group
        finally:
            group.rmdir()
        return
    yield None


def run(command: list[str], group: Path | None) -> tuple[float, int]:
    """Seconds of a command, and the most bytes of its resident set."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    begun = time.perf_counter()
    most = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=enter)
    while process.poll() is None:
        time.sleep(0.5)
        status = Path(f"/proc/{process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        most = max([most, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))])
    if process.returncode:
        raise SystemExit(f"the command ended with status {process.returncode}")
    return time.perf_counter() - begun, most


def main() -> int:
    """Print one JSON object; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_250_000)
    rows: int = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.parquet", Path(folder) / "out"
        write(source, rows)
        command = [
            sys.executable, "-m", "llmbatch", "run", str(source), "--output", str(out), "--model", str(smollm2()),
            "--prompt", "text", "--engine", "simulated", "--output-tokens", "tokens", "--max-tokens", "64",
            "--kv-memory", "200MB", "--quiet",
        ]  # fmt: skip  # options with their values
        with limited() as group:
            seconds, peak = run(command, group)
        parts = [pq.read_metadata(part) for part in sorted(out.glob("*.parquet"))]
        result = {
            "rows": rows,
            "input_bytes": source.stat().st_size,
            "limit_bytes": LIMIT,
            "limit_enforced": group is not None,
            "seconds": seconds,
            "peak_resident_bytes": peak,
            "rows_out": sum(part.num_rows for part in parts),
        }
    print(json.dumps(result))
    return int(peak > LIMIT or result["rows_out"] != rows)


if __name__ == "__main__":
    raise SystemExit(main())
