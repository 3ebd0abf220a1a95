"""One window whose answers hold 3 GB of text: killed half way, gone on with, killed before its end, and finished.

The engine is simulated, and gives each row a text of its own of some 30 KB. Memory is the most bytes that any of the
three processes had. Exit status 1 where a row has another text than it should, or none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

ROWS = 100_000
_DONE = re.compile(r"([\d,]+) of [\d,]+ rows, ")
_LETTERS = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 1 << 17).tolist())


def text_of(row: int, length: int) -> str:
    """The text that row `row` gets: no two begin alike."""
    start = row * 7919 % (len(_LETTERS) - length)
    return f"{row}:{_LETTERS[start : start + length]}"


def job(length: int, arguments: list[str]) -> int:
    """Run a job whose simulated answers are long."""
    import llmbatch.inference.worker
    from llmbatch.cli.main import main as command
    from llmbatch.preprocess.request_batch import RequestBatch

    def texts(requests: RequestBatch, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]) -> list[str]:
        return [text_of(row, length) for row in requests.serial[index].tolist()]

    vars(llmbatch.inference.worker)["placeholder_texts"] = texts
    return command(arguments)


def watched(command: list[str], kill_at: int | None) -> tuple[int, int, float]:
    """The status of a command, its most bytes of memory and its seconds; killed when so many rows are answered."""
    begun, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        while process.poll() is None:
            time.sleep(0.2)
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            most = max([most, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))])
            said.seek(0)
            done = [int(number.replace(",", "")) for number in _DONE.findall(said.read())]
            if kill_at is not None and done and done[-1] >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
        said.seek(0)
        if process.returncode > 0:
            sys.stderr.write(said.read()[-2000:])
    return process.returncode, most, time.perf_counter() - begun


def wrong_rows(out: Path, rows: int, length: int) -> int:
    """Rows of an output that have not the text they should."""
    wrong, seen = 0, 0
    for part in sorted(out.glob("*.parquet")):
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(512, columns=["id", "generated_text"]):
                for row, text in zip(batch["id"].to_pylist(), batch["generated_text"].to_pylist()):
                    wrong += text != text_of(row, length) or row != seen
                    seen += 1
    return wrong + abs(rows - seen)


def main() -> int:
    """Print one JSON object; returns the exit status."""
    if sys.argv[1:2] == ["job"]:
        return job(int(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of text, 10**9 bytes")
    parser.add_argument("--folder", help="where files are written, instead of the folder for temporary ones")
    given = parser.parse_args()
    length = int(given.gigabytes * 1e9 / ROWS)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        source, out = Path(folder) / "in.parquet", Path(folder) / "out"
        texts = [f"Write a story about topic {i}." for i in range(ROWS)]
        tokens = pa.array(np.full(ROWS, 8, np.int32))
        pq.write_table(pa.table({"id": pa.array(range(ROWS)), "text": texts, "tokens": tokens}), source)
        command = [
            sys.executable, str(Path(__file__).resolve()), "job", str(length), "run", str(source), "--output", str(out),
            "--model", str(smollm2()), "--prompt", "text", "--engine", "simulated", "--output-tokens", "tokens",
            "--max-tokens", "64", "--window-rows", str(ROWS),
        ]  # fmt: skip  # options with their values
        runs = [watched(command, kill_at) for kill_at in (ROWS // 2, ROWS * 95 // 100, None)]
        result = {
            "text_bytes": length * ROWS,
            "statuses": [status for status, _, _ in runs],
            "peak_resident_bytes": [peak for _, peak, _ in runs],
            "seconds": [seconds for _, _, seconds in runs],
            "rows_wrong": wrong_rows(out, ROWS, length),
        }
    print(json.dumps(result))
    return int(runs[-1][0] != 0 or result["rows_wrong"] != 0)


if __name__ == "__main__":
    raise SystemExit(main())
