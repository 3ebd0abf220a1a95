"""A million rows through a whole job with the simulated engine: rows a second, memory over the run, and resume.

The job is killed (SIGKILL) when half of its rows are answered and started again. Memory is the process's resident set,
looked at once a second; it is flat when the second half's highest is the first half's. The resume is decided when the
second process says how many rows it found.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

_ROWS = 50_000  # written at once
_DONE = re.compile(r"([\d,]+) of [\d,]+ rows, ")
_FOUND = re.compile(r"of which ([\d,]+) of [\d,]+ rows are answered")


def write(path: Path, rows: int) -> None:
    """Prompts of some 40 tokens with a shared beginning, answers of 1 to 63 tokens."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("tokens", pa.int32())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, _ROWS):
            ids = range(first, min(first + _ROWS, rows))
            texts = [
                f"Please classify the following review as positive or negative. Topic {i % 997}, review {i}: "
                f"the product {i * 31 % 1009} arrived late but works."
                for i in ids
            ]
            tokens = rng.integers(1, 64, len(texts)).astype(np.int32)
            writer.write_table(pa.table({"id": list(ids), "text": texts, "tokens": tokens}, schema=schema))


def resident(pid: int) -> int:
    """Bytes of a process's resident set."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Run:
    """One process of the job, watched until it ends or has answered `kill_at` rows."""

    def __init__(self, command: list[str], kill_at: int | None) -> None:
        self.memory: list[int] = []
        self.decided: float | None = None
        self.found = 0
        begun = time.perf_counter()
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
            while process.poll() is None:
                time.sleep(0.2 if self.decided is None else 1.0)
                self.memory.append(resident(process.pid))
                said.seek(0)
                text = said.read()
                found = _FOUND.search(text)
                if found and self.decided is None:
                    self.decided, self.found = time.perf_counter() - begun, int(found[1].replace(",", ""))
                done = [int(number.replace(",", "")) for number in _DONE.findall(text)]
                if kill_at is not None and done and done[-1] >= kill_at:
                    process.kill()
            assert process.stdout is not None
            self.report = process.stdout.read()
            process.stdout.close()
        self.seconds = time.perf_counter() - begun


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows: int = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.parquet", Path(folder) / "out"
        write(source, rows)
        command = [
            sys.executable, "-m", "llmbatch", "run", str(source), "--output", str(out), "--model", str(smollm2()),
            "--prompt", "text", "--engine", "simulated", "--output-tokens", "tokens", "--max-tokens", "64", "--json",
        ]  # fmt: skip  # options with their values
        whole = Run(command, None)
        report = json.loads(whole.report)
        expected = pq.read_table(out)
        killed = Run([*command, "--restart"], rows // 2)
        resumed = Run(command, None)
        same = ["id", "text", "generated_text", "num_generated_tokens", "error"]
        assert pq.read_table(out, columns=same).equals(expected.select(same)), "another output after a kill"
    half = len(whole.memory) // 2
    print(
        json.dumps(
            {
                "rows": rows,
                "rows_per_second": rows / report["seconds"],
                "load_seconds": report["load_seconds"],
                "memory_first_half": max(whole.memory[:half]),
                "memory_second_half": max(whole.memory[half:]),
                "killed_after_seconds": killed.seconds,
                "resume_decided_seconds": resumed.decided,
                "rows_found": resumed.found,
                "rows_resumed": json.loads(resumed.report)["rows_resumed"],
            }
        )
    )


if __name__ == "__main__":
    main()
