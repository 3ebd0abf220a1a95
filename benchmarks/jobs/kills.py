"""A job on a real model, killed with SIGKILL at random moments: what is lost, and whether any answer is another one.

    python benchmarks/jobs/kills.py [--rows 2000] [--kills 20] [--max-tokens 8] [--seed 0] [--storage s3://bucket/folder]

One job runs undisturbed. Then the same job, on another output, is killed at a random moment and run again until it
is done; where that takes fewer kills than asked for, the next job begins. Each must have exactly the answers of the
undisturbed one. A row is lost that a killed process had answered and the next one did not find. The journal may hold
back 1,000 rows, or those of 5 seconds; exit status 1 where a kill loses more, or where an answer differs.

With `--storage` input and outputs lie there; the store's address and keys come from the environment
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...). Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from llmbatch.inference.answers.assembler import ROWS_AT_RISK, SECONDS_AT_RISK
from llmbatch.storage.location import Location

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

SHARE = 0.4  # of the seconds that the undisturbed job answers: the most that a process has before it is killed,
LEAST = 3 * SECONDS_AT_RISK  # but so many seconds may always be what it has, or no process would ever keep a row
RUNNING = 128  # rows in flight, so that some end early
COLUMNS = ("id", "generated_text", "num_input_tokens", "num_generated_tokens", "finish_reason", "error")

# The command, which notes in a file that outlives it: rows found answered, begun, and ended.
COMMAND = """
import os, sys
from llmbatch.inference.answers.assembler import AnswerAssembler
from llmbatch.jobs.answer_writer import AnswerWriter
from llmbatch.cli.main import main

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def noting(owner, name, count):
    function = getattr(owner, name)
    def noted(self, *args):
        function(self, *args)
        os.write(log, f"{name} {count(*args)}\\n".encode())
    setattr(owner, name, noted)

noting(AnswerWriter, "joined", lambda window: window.earlier.num_rows)
noting(AnswerAssembler, "begun", lambda window, requests: len(requests))
noting(AnswerAssembler, "ended", lambda ended: len(ended.requests))
raise SystemExit(main(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True)
class Life:
    """What a process noted until it ended or was killed."""

    killed: bool
    found: int | None  # None: it had not come so far
    begun: int
    ended: int
    seconds: float  # since it began to answer


@dataclass(slots=True)
class Result:
    """The line that is printed."""

    rows: int
    storage: str
    undisturbed_seconds: float  # of answering
    kills: int = 0
    jobs: int = 0
    lost: list[int] = field(default_factory=list)  # rows, by kill
    in_flight: list[int] = field(default_factory=list)  # rows, by kill
    different: int = 0  # answers that are not those of the undisturbed job

    @property
    def good(self) -> bool:
        """Whether the promise was kept."""
        return self.different == 0 and max(self.lost, default=0) <= ROWS_AT_RISK


def questions(rows: int) -> pa.Table:
    """Short prompts, no two alike."""
    rng = np.random.default_rng(1)
    what = ("Name a town near", "What is larger than", "Write a word that begins like", "Who lived in", "What is")
    things = ("a river", "the moon", "an apple", "Paris", "a small house", "the sea", "bread", "an old book")
    texts = [f"{what[a]} {things[b]}? ({i})" for i, (a, b) in enumerate(rng.integers(0, (5, 8), (rows, 2)).tolist())]
    return pa.table({"id": range(rows), "prompt": texts})


def run_noting(
    program: str, command: list[str], seconds: float | None, number: signal.Signals = signal.SIGKILL
) -> tuple[bool, list[list[str]], float]:
    """Run a program that notes lines in a file, and signal it so many seconds after the first one, if it is not done.

    Returns whether it ended by the signal `number`, the words of its lines, and the seconds since the first one.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = subprocess.Popen([sys.executable, "-c", program, str(log), *command])
        killed = False
        try:
            while process.poll() is None and not (log.exists() and log.read_bytes()):
                time.sleep(0.02)
            begun = time.perf_counter()
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            killed = process.wait() in (-number, 128 + number)
        finally:
            process.kill()
            process.wait()
        seconds = time.perf_counter() - begun
        if not killed and process.returncode:
            raise SystemExit(f"the command failed with status {process.returncode}")
        return killed, [line.split() for line in log.read_text().splitlines()] if log.exists() else [], seconds


def run(command: list[str], seconds: float | None) -> Life:
    """Run a command, and kill it so many seconds after it has begun to answer, if it is not done by then."""
    killed, noted, took = run_noting(COMMAND, command, seconds)
    sums = {name: [int(count) for what, count in noted if what == name] for name in ("joined", "begun", "ended")}
    found = sum(sums["joined"]) if sums["joined"] else None
    return Life(killed, found, sum(sums["begun"]), sum(sums["ended"]), took)


def answers(url: str) -> pa.Table:
    """What a finished job wrote."""
    files, path = fsspec.url_to_fs(url)
    return ds.dataset(path, filesystem=files, format="parquet").to_table(list(COLUMNS)).sort_by("id")


def differences(one: pa.Table, other: pa.Table) -> int:
    """Rows that are not equal, or missing, or there twice."""
    rows, others = one.to_pylist(), other.to_pylist()
    return abs(len(rows) - len(others)) + sum(int(a != b) for a, b in zip(rows, others))


def kill_jobs(command: list[str], url: str, expected: pa.Table, result: Result, kills: int, seed: int) -> None:
    """Run jobs and kill them until so many kills were survived."""
    rng = np.random.default_rng(seed)
    most = max(SHARE * result.undisturbed_seconds, LEAST)
    while result.kills < kills:
        output = f"{url}/killed-{result.jobs}"
        last = Life(False, 0, 0, 0, 0.0)
        while True:
            life = run([*command, "--output", output], float(rng.uniform(0, most)))
            if last.killed and last.found is not None:
                found = expected.num_rows if life.found is None else life.found
                result.lost.append(last.found + last.ended - found)
                result.in_flight.append(last.begun - last.ended)
            result.kills += life.killed
            last = life
            if not life.killed:
                break
            print(f"kill {result.kills}: {life}", file=sys.stderr, flush=True)
        result.jobs += 1
        result.different += differences(expected, answers(output))


@contextmanager
def place(storage: str | None) -> Iterator[str]:
    """URL of a folder of our own, that is gone afterwards."""
    if storage is None:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    url = f"{storage.rstrip('/')}/kills-{os.getpid()}"
    try:
        yield url
    finally:
        Location.at(url).clear()


def main() -> int:
    """Kill, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill a job at random moments.")
    add = parser.add_argument
    add("--rows", type=int, default=2000)
    add("--kills", type=int, default=20)
    add("--max-tokens", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--storage", metavar="URL", help="where input and outputs lie (a temporary folder)")
    given = parser.parse_args()
    with place(given.storage) as url:
        source = f"{url}/questions.parquet"
        with fsspec.open(source, "wb") as file:
            pq.write_table(questions(given.rows), file)
        command = ["run", source, "--model", str(smollm2()), "--prompt", "prompt", "--dtype", "float32", "--quiet"]
        command += ["--max-tokens", str(given.max_tokens), "--max-running", str(RUNNING)]
        life = run([*command, "--output", f"{url}/undisturbed"], None)
        result = Result(given.rows, given.storage or "local", life.seconds)
        kill_jobs(command, url, answers(f"{url}/undisturbed"), result, given.kills, given.seed)
    print(json.dumps(asdict(result) | {"most_lost": max(result.lost, default=0), "good": result.good}))
    return int(not result.good)


if __name__ == "__main__":
    raise SystemExit(main())
