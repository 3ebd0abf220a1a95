"""A Parquet file larger than memory should hold, through Polars, a stream and DuckDB with the simulated engine.

    python benchmarks/jobs/frames.py [--gigabytes 2] [--limit 1]

Three ways from the file to an answered file, each in a process of its own: a lazy frame of Polars into `sink_parquet`,
`op.stream` of a dataset of pyarrow into a Parquet writer, and `op.stream` of a relation of DuckDB into its `COPY`. What
counts is how far the resident set rises above what it was with the model loaded and one row answered. Exit status 1
where it rose by more than the limit, or where rows are missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from large import DOCUMENT, write

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

PROMPT = "text"
GROUP = 8192  # rows of a row group: by default Polars and DuckDB hold groups of 1.0 and .5 GB of these rows in memory


def resident() -> int:
    """Bytes of this process in memory, less pages of mapped files that the system may drop."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class Peak:
    """The most bytes that this process has in memory, looked at every 20 ms."""

    def __init__(self) -> None:
        self.nbytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.nbytes = max(self.nbytes, resident())


def through_polars(op: Any, source: Path, target: Path) -> None:
    """A lazy frame into a sink."""
    import polars as pl

    lazy: Any = pl.scan_parquet(source)
    lazy.llm.generate(op).sink_parquet(target, row_group_size=GROUP)


def through_stream(op: Any, source: Path, target: Path) -> None:
    """A dataset as a reader, batch by batch into a writer."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    reader = op.stream(ds.dataset(source))
    with pq.ParquetWriter(target, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def through_duckdb(op: Any, source: Path, target: Path) -> None:
    """A relation as a reader, which a query copies to a file."""
    import duckdb

    asked = duckdb.connect().sql(f"select * from '{source}'")
    answers = op.stream(asked)  # noqa: F841  # DuckDB finds it by its name
    duckdb.connect().sql("select * from answers").write_parquet(str(target), row_group_size=GROUP)


WAYS: dict[str, Callable[[Any, Path, Path], None]] = {
    "polars": through_polars,
    "stream": through_stream,
    "duckdb": through_duckdb,
}


def measure(way: str, source: Path, target: Path) -> dict[str, float]:
    """Answer the file in this process."""
    import pyarrow as pa

    from llmbatch import LLMOperator

    op: Any = LLMOperator(model=str(smollm2()), prompt=PROMPT, engine="simulated", max_tokens=16, kv_memory=1 << 30)
    op(pa.table({PROMPT: ["one row"]}))
    before = resident()
    begun = time.perf_counter()
    with Peak() as peak:
        WAYS[way](op, source, target)
    return {"seconds": time.perf_counter() - begun, "before": before, "rise": peak.nbytes - before}


def main() -> int:
    """Write the file, answer it in each way, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=1.0, help="gigabytes above the loaded model")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--files", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, *options.files)))
        return 0
    import pyarrow.parquet as pq

    bad = False
    with tempfile.TemporaryDirectory() as scratch:
        source, rows = Path(scratch) / "rows.parquet", int(options.gigabytes * 1e9 / (DOCUMENT + 60))
        write(source, rows)
        print(f"{rows:,} rows, {source.stat().st_size / 1e9:.2f} GB", flush=True)
        for way in WAYS:
            target = Path(scratch) / f"{way}.parquet"
            command = [sys.executable, __file__, "--way", way, "--files", str(source), str(target)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            ids = pq.read_table(target, columns=["tokens", "generated_text"])
            whole = ids.num_rows == rows and ids["generated_text"].null_count == 0
            bad |= not whole or found["rise"] > options.limit * 1e9
            print(
                f"{way:8}{found['seconds']:8.1f} s, {found['before'] / 1e9:.2f} GB before, "
                f"{found['rise'] / 1e9:5.2f} GB more at most, {'all rows' if whole else 'ROWS ARE MISSING'}",
                flush=True,
            )
            target.unlink()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
