"""A job at an endpoint, while both are killed with SIGKILL: what is lost, and whether any answer is another one.

    python benchmarks/serving/kills_beside.py [--rows 2000] [--kills 8] [--max-tokens 8] [--seed 0]

`llmbatch run` answers the rows once, undisturbed. Then `llmbatch run --beside` answers them at `llmbatch serve`. At
random moments the endpoint is killed and started again at the same port; every second time the client is killed too,
and the same command is run again. In the end each row must be there once, with its undisturbed answer (greedy,
float32). Prints one line of JSON; exit status 1 where a row differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from kills import answers, differences, questions
from rounds import demo_model

LEAST, MOST = 3.0, 10.0  # seconds from the endpoint's readiness to its end
COMMAND = (sys.executable, "-m", "llmbatch")


@dataclass(slots=True)
class Result:
    """The line that is printed."""

    rows: int
    endpoint_kills: int = 0
    client_kills: int = 0
    different: int = 0  # rows that are lost, twice there, or have another answer
    seconds: float = 0.0


class Killed:
    """An endpoint at a port of its own, that can be killed and started again."""

    def __init__(self, model: str, state_dir: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        self._command = (
            *COMMAND,
            "serve",
            "--model",
            model,
            "--dtype",
            "float32",
            "--port",
            port,
            "--state-dir",
            state_dir,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the endpoint ended with status {self._process.returncode}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def disturb(command: list[str], endpoint: Killed, result: Result, kills: int, rng: np.random.Generator) -> None:
    """Run the command at the endpoint until it is done, killing the one, the other or none of the two."""
    client = subprocess.Popen(command)
    try:
        while True:
            try:
                status = client.wait(float(rng.uniform(LEAST, MOST)))
            except subprocess.TimeoutExpired:
                if result.endpoint_kills == kills:
                    continue
                endpoint.kill()
                result.endpoint_kills += 1
                both = result.endpoint_kills % 2 == 0
                if both:
                    client.kill()
                    client.wait()
                    result.client_kills += 1
                endpoint.start()
                if both:
                    client = subprocess.Popen(command)
                print(f"kill {result.endpoint_kills}", file=sys.stderr, flush=True)
                continue
            if status:
                raise SystemExit(f"the job ended with status {status}")
            return
    finally:
        client.kill()
        client.wait()


def main() -> int:
    """Kill, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill an endpoint and a job that runs there.")
    add = parser.add_argument
    add("--rows", type=int, default=2000)
    add("--kills", type=int, default=8)
    add("--max-tokens", type=int, default=8)
    add("--seed", type=int, default=0)
    given = parser.parse_args()
    model, result = demo_model(), Result(given.rows)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "questions.parquet")
        pq.write_table(questions(given.rows), source)
        command = [*COMMAND, "run", str(source), "--model", model, "--prompt", "prompt", "--quiet"]
        command += ["--max-tokens", str(given.max_tokens)]
        subprocess.run([*command, "--dtype", "float32", "--output", f"{folder}/undisturbed"], check=True)
        endpoint = Killed(model, f"{folder}/endpoint")
        try:
            endpoint.start()
            begun = time.perf_counter()
            beside = [*command, "--beside", endpoint.url, "--output", f"{folder}/killed"]
            disturb(beside, endpoint, result, given.kills, np.random.default_rng(given.seed))
            result.seconds = time.perf_counter() - begun
        finally:
            endpoint.kill()
        result.different = differences(answers(f"{folder}/undisturbed"), answers(f"{folder}/killed"))
    print(json.dumps(asdict(result)))
    return int(result.different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
