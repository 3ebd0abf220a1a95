"""JSONL in: bytes a second of one pass over chats and over short rows, and the memory it takes.

A pass finds the columns; a job makes another one, window by window, for the rows. Both are measured, and reading the
rows with their lines, as a job does that writes JSONL.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from llmbatch.io.reading.dataset import Dataset

_WINDOW = 50_000  # rows
_SAMPLES = 2000  # distinct lines, written again and again


def chats() -> list[str]:
    """Lines of some 800 bytes: two messages and a number."""
    words = [f"w{number}" for number in range(5000)]
    lines = []
    for number in range(_SAMPLES):
        text = " ".join(random.choices(words, k=140)) + '\n"end"'
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        lines.append(json.dumps({"id": number, "messages": messages, "score": number * 0.5}))
    return lines


def short() -> list[str]:
    """Lines of some 100 bytes."""
    return [
        json.dumps({"id": n, "date": "2024-01-01", "prompt": f"Is review {n} positive or not?"})
        for n in range(_SAMPLES)
    ]


def read(inputs: Dataset) -> float:
    """Seconds of reading all rows, a window at a time."""
    begun = time.perf_counter()
    reader = inputs.reader()
    for start in range(0, inputs.num_rows, _WINDOW):
        reader.read(start, min(start + _WINDOW, inputs.num_rows))
    reader.close()
    return time.perf_counter() - begun


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=1000)
    size: int = parser.parse_args().megabytes * 10**6
    random.seed(0)
    result: dict[str, object] = {"bytes": size}
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("chats", chats()), ("short", short())):
            path = Path(folder) / f"{name}.jsonl"
            piece = "".join(f"{line}\n" for line in lines)
            with path.open("w") as file:
                for _ in range(max(1, size // len(piece))):
                    file.write(piece)
            written = path.stat().st_size
            begun = time.perf_counter()
            inputs = Dataset.resolve([str(path)])
            seconds = {"columns": time.perf_counter() - begun}
            seconds |= {"rows": read(inputs), "rows_and_lines": read(inputs.with_lines())}
            result[name] = {what: f"{written / 1e6 / each:.0f} MB/s" for what, each in seconds.items()}
            path.unlink()
    result["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1024 if sys.platform == "linux" else 1
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
