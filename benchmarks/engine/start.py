"""What a job takes from the start of its process to its end, with three short rows: cold, and warm.

    python benchmarks/engine/start.py [--runs 3] [--model FILE_OR_FOLDER] [--other FILE_OR_FOLDER] [--json FILE]
    python benchmarks/engine/start.py --kill-every 8 [--rows 600]

Cold: no compiled code, no converted weights, nothing measured; each run has a cache of its own. What another process
still compiles when such a job has ended is waited for, and not counted. The first job of another family follows with
the same caches, and once more: `other_family` is what the first takes longer, without the conversion of its weights
(`other_conversion`). Warm runs share a cache.
`parts_warm` and `parts_cold` say what the seconds of such a job went to, in its own process; what another process
compiles meanwhile is not among them. With `--kill-every` a job of many rows is killed after so many seconds, from a
cold start, until it ends. Prints one line of JSON; exit status 1 where a figure misses what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

MUST = {"cold": 30.0, "other_family": 8.0, "warm": 6.0, "warm_simulated": 2.5, "help": 0.4, "import": 0.15}  # seconds
QUESTIONS = ("What is the capital of France?", "Name a colour.", "What is two and two?")
MOST_KILLS = 40

# The command, which says at its end what its seconds went to. A part does not count those inside it.
PARTS = """
import json, sys, time
began = time.perf_counter()
spent, inside = {}, []

def count(name, function):
    def counted(*args, **kwargs):
        inside.append(0.0)
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds, within = time.perf_counter() - begun, inside.pop()
            spent[name] = spent.get(name, 0.0) + seconds - within
            if inside:
                inside[-1] += seconds
    return counted

def load():
    import llmbatch.jobs.job, llmbatch.engine.model.loader, llmbatch.engine.preparation, llmbatch.engine.cpu.engine
count("imports", load)()

from numba.core.dispatcher import Dispatcher
from llmbatch.perf_model import hardware
from llmbatch.inference import worker
from llmbatch.engine.model import checkpoints
from llmbatch.engine.model import config
from llmbatch.engine.model import loader
from llmbatch.engine import factory
from llmbatch.engine.cpu import engine
from llmbatch.runtime.warmup import Compilation
Dispatcher.compile = count("compiling, and loading compiled code", Dispatcher.compile)
Compilation.finish = count("waiting for the other process that compiles", Compilation.finish)
checkpoints.resolve_model = count("conversion of weights", checkpoints.resolve_model)
worker.load_tokenizer = count("tokenizer", worker.load_tokenizer)
config.describe_model = count("config, and which type is faster", config.describe_model)
hardware.measure_cpu = factory.measure_cpu = count("measuring the processor", hardware.measure_cpu)
loader.load_model = count("weights and layers", loader.load_model)
engine.CpuEngine.execute = count("steps, with the first touch of memory", engine.CpuEngine.execute)

from llmbatch.cli.main import main
status = main(sys.argv[1:])
spent["all else"] = time.perf_counter() - began - sum(spent.values())
print("PARTS " + json.dumps({name: round(seconds, 2) for name, seconds in spent.items()}), file=sys.stderr)
sys.exit(status)
"""


class Start:
    """Commands in a folder, by a cache of their own."""

    def __init__(self, work: Path, cache: Path) -> None:
        self._work = work
        self._cache = cache
        self._environment = {**os.environ, "LLMBATCH_CACHE": str(cache), "NUMBA_CACHE_DIR": ""}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users' Python keeps what it has compiled

    def seconds(self, *command: str) -> tuple[float, str]:
        """Seconds of a Python process, and what it wrote to standard error."""
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *command], env=self._environment, check=True, capture_output=True, text=True
        )
        return time.perf_counter() - begun, done.stderr

    def job(self, model: str, *options: str, program: tuple[str, ...] = ("-m", "llmbatch")) -> tuple[float, str]:
        """Seconds of a job of three rows."""
        output = Path(tempfile.mkdtemp(prefix="out-", dir=self._work))
        command = self.command(model, write_rows(self._work, len(QUESTIONS)), output)
        return self.seconds(*program, *command, *options)

    def settle(self) -> None:
        """Wait until the other process of a cold job has compiled what plans and schedules."""
        while not next(self._cache.glob("compiled/*/scheduler"), None):
            time.sleep(0.1)

    def command(self, model: str, rows: Path, output: Path) -> tuple[str, ...]:
        """What a job is asked."""
        given = ("run", str(rows), "--output", str(output), "--model", model, "--prompt", "question")
        return (*given, "--max-tokens", "16")

    def killed(self, model: str, rows: int, seconds: float) -> dict[str, Any]:
        """A job that is killed every so many seconds, until it ends."""
        output = self._work / "killed"
        command = [sys.executable, "-m", "llmbatch", *self.command(model, write_rows(self._work, rows), output)]
        for kills in range(MOST_KILLS):
            process = subprocess.Popen(command, env=self._environment, stderr=subprocess.DEVNULL)
            try:
                if process.wait(seconds) == 0:
                    return {"rows": rows, "kill_every": seconds, "kills": kills, "ended": True}
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        return {"rows": rows, "kill_every": seconds, "kills": MOST_KILLS, "ended": False}


def write_rows(work: Path, count: int) -> Path:
    """So many short questions."""
    path = work / f"{count}.jsonl"
    short = len(QUESTIONS)
    texts = (QUESTIONS[i % short] + (f" ({i})" if i >= short else "") for i in range(count))
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return path


def parts(told: str) -> dict[str, float]:
    """What a job said that its seconds went to."""
    line = next(line for line in told.splitlines() if line.startswith("PARTS "))
    found: dict[str, float] = json.loads(line.removeprefix("PARTS "))
    return found


def measure(work: Path, model: str, other: str | None, runs: int) -> dict[str, Any]:
    """Every figure: the median of so many processes, and all of them."""
    times: dict[str, list[float]] = {name: [] for name in MUST}
    conversions: list[float] = []  # seconds, of the other family's weights
    for run in range(runs):
        start = Start(work, work / f"cache-{run}")
        times["cold"].append(start.job(model)[0])
        start.settle()
        if other is not None:
            first, told = start.job(other, program=("-c", PARTS))
            conversions.append(parts(told)["conversion of weights"])
            times["other_family"].append(first - conversions[-1] - start.job(other)[0])
    warm = Start(work, work / "cache-0")
    for _ in range(runs):
        times["warm"].append(warm.job(model)[0])
        times["warm_simulated"].append(warm.job(model, "--engine", "simulated")[0])
        times["help"].append(warm.seconds("-m", "llmbatch", "--help")[0])
        times["import"].append(warm.seconds("-c", "import llmbatch")[0])
    program = ("-c", PARTS)
    cold = Start(work, work / "cache-parts")
    parts_cold = parts(cold.job(model, program=program)[1])
    cold.settle()
    return {
        "seconds": {name: round(statistics.median(all_), 2) for name, all_ in times.items() if all_},
        "all": {name: [round(one, 2) for one in all_] for name, all_ in times.items() if all_},
        "other_conversion": [round(one, 2) for one in conversions],
        "parts_warm": parts(warm.job(model, program=program)[1]),
        "parts_cold": parts_cold,
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (SmolLM2-135M-Instruct)")
    parser.add_argument("--other", help="a model of another family")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kill-every", type=float, metavar="SECONDS")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    model = arguments.model or str(smollm2())
    # The process that compiles may still write into a cache when its folder goes.
    with tempfile.TemporaryDirectory(prefix="llmbatch-start-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        if arguments.kill_every is not None:
            figures = Start(work, work / "cache").killed(model, arguments.rows, arguments.kill_every)
            missed = not figures["ended"]
        else:
            figures = measure(work, model, arguments.other, arguments.runs)
            missed = any(seconds > MUST[name] for name, seconds in figures["seconds"].items())
    line = json.dumps(figures)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
