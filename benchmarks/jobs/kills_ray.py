"""A job on Ray whose actors are killed with SIGKILL and whose node is lost: what runs twice, whether an answer changes.

    python benchmarks/jobs/kills_ray.py [--rows 2000] [--kills 20] [--actors 3] [--rows-per-shard 40] [--seed 0]

`map_dataset` answers the rows of `benchmarks/jobs/kills.py` on a cluster of two nodes: once undisturbed, and once while
processes of actors are killed. A moment is a number of answered rows, drawn beforehand, and who dies is drawn from the
processes that run rows then. When half of the rows are answered the second node is removed with all that runs there.

Processes note which rows they begin and report, in a file that outlives them, so what ran twice is not counted by the
job itself. It may be what the dead had in hand: in the engine, or answered and on its way to the ledger, 1,000 rows at
most. Exit status 1 where it is more, where an answer differs, or where the job ended before the last kill.

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from kills import COLUMNS, differences, questions
from ray.cluster_utils import Cluster

from llmbatch import LLMOperator
from llmbatch.inference.answers.assembler import ROWS_AT_RISK
from llmbatch.operators.ray import map_dataset
from llmbatch.operators.ray.in_flight import ENDED, RUNNING, left_behind

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

FIRST, LAST = 0.02, 0.9  # of the rows are answered at the first kill at least, at the last one at most
KV_MEMORY = 1 << 29  # of an actor


@dataclass(slots=True)
class Result:
    """The line that is printed."""

    rows: int
    actors: int
    undisturbed_seconds: float = 0.0
    seconds: float = 0.0  # of the other job; both with the start of the cluster
    kills: int = 0
    nodes_lost: int = 0
    in_flight: list[int] = field(default_factory=list)  # rows, by death
    lost: list[int] = field(default_factory=list)  # rows answered and perhaps not in the ledger, by death
    repeated: int = 0  # rows that began once more
    most_attempts: int = 0  # of a row
    different: int = 0  # answers that are not those of the undisturbed job

    @property
    def good(self) -> bool:
        """Whether the promise was kept."""
        in_hand = sum(self.in_flight) + sum(self.lost)
        return self.different == 0 and self.repeated <= in_hand and max(self.lost, default=0) <= ROWS_AT_RISK


@dataclass(frozen=True, slots=True)
class Actor:
    """A process of an actor: the file of the rows that it has in hand, which is named after it."""

    flight: Path

    @property
    def process(self) -> int:
        """Its number."""
        return int(self.flight.name.rpartition("-")[2])

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return Path(f"/proc/{self.process}").exists()

    @property
    def parent(self) -> int:
        """The number of its node's process."""
        return int(Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[1])

    def in_hand(self, state: int) -> int:
        """Rows in this state."""
        return int((left_behind(self.flight)["state"] == state).sum())


class Stage:
    """A cluster of two nodes, each with room for all actors, whose processes note what they do in a folder."""

    def __init__(self, folder: Path, actors: int) -> None:
        self._folder, self._log = folder, folder / "log"
        self._log.touch()
        room = {"place": actors}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "resources": room, "include_dashboard": False}
        )
        self._second = self._cluster.add_node(num_cpus=0, resources=room)
        ray.init(
            address=self._cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": {"TMPDIR": str(folder)}, "worker_process_setup_hook": noting(str(self._log))},
        )
        ray.data.DataContext.get_current().enable_progress_bars = False

    def close(self) -> None:
        """End all processes."""
        ray.shutdown()
        self._cluster.shutdown()

    def noted(self, name: str) -> int:
        """Rows that were begun (`enter`) or reported (`leave`) so far, by all processes."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return sum(int(rows) for what, rows in lines if what == name)

    def running(self) -> list[Actor]:
        """The actors that run rows."""
        return [actor for actor in self._actors() if actor.in_hand(RUNNING)]

    def kill(self, actor: Actor, result: Result) -> None:
        """Kill a process."""
        with self._watching([actor], result):
            os.kill(actor.process, signal.SIGKILL)
        result.kills += 1

    def lose_node(self, result: Result) -> None:
        """Remove the second node."""
        process = self._second.all_processes["raylet"][0].process.pid
        there = [actor for actor in self._actors() if actor.parent == process]
        with self._watching(there, result):
            self._cluster.remove_node(self._second, allow_graceful=False)
        result.nodes_lost += 1

    def _actors(self) -> list[Actor]:
        actors = [Actor(path) for path in sorted(self._folder.glob("llmbatch-flight-*"))]
        return [actor for actor in actors if actor.alive]

    @contextmanager
    def _watching(self, actors: list[Actor], result: Result) -> Iterator[None]:
        """Count what actors have in hand when they die."""
        kept = [Actor(self._folder / f"kept-{actor.process}") for actor in actors]
        for actor, other in zip(actors, kept):  # the next process removes the file when it has read it
            os.link(actor.flight, other.flight)
        yield
        while any(actor.alive for actor in actors):
            time.sleep(0.01)
        result.in_flight.append(sum(actor.in_hand(RUNNING) for actor in kept))
        result.lost.append(sum(actor.in_hand(ENDED) for actor in kept))


def noting(log: str) -> Callable[[], None]:
    """What each process of Ray does first. A function in a function is sent whole, not by its name."""

    def note() -> None:
        from llmbatch.operators.ray.in_flight import InFlightRows

        file = os.open(log, os.O_WRONLY | os.O_APPEND)

        def note_calls(name: str) -> None:
            function = getattr(InFlightRows, name)

            def noted(self: Any, rows: Any) -> Any:
                result = function(self, rows)
                os.write(file, f"{name} {len(rows)}\n".encode())
                return result

            setattr(InFlightRows, name, noted)

        note_calls("enter")
        note_calls("leave")

    return note


def disturb(stage: Stage, moments: list[tuple[int, bool]], seed: int, result: Result, done: threading.Event) -> None:
    """At each moment, a number of answered rows, lose the node or kill a process that runs rows."""
    rng = np.random.default_rng(seed)
    for rows, node in moments:
        while stage.noted("leave") < rows or not (running := stage.running()):
            if done.wait(0.02):
                return
        if node:
            stage.lose_node(result)
        else:
            stage.kill(running[rng.integers(len(running))], result)
        in_hand = f"{result.in_flight[-1]} rows in flight and {result.lost[-1]} answered"
        print(f"{result.kills} kills, {result.nodes_lost} nodes lost: {in_hand}", file=sys.stderr, flush=True)


def answer(table: pa.Table, given: argparse.Namespace, moments: list[tuple[int, bool]], result: Result) -> pa.Table:
    """The table with its answers, by id, and what happened at these moments."""
    op: Any = LLMOperator(
        model=str(smollm2()),
        prompt="prompt",
        chat=True,
        max_tokens=given.max_tokens,
        dtype="float32",
        kv_memory=KV_MEMORY,
    )
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), given.actors)
        done = threading.Event()
        disturber = threading.Thread(target=disturb, args=(stage, moments, given.seed, result, done))
        disturber.start()
        try:
            answered = map_dataset(
                ray.data.from_arrow(table),
                op,
                concurrency=given.actors,
                num_cpus=0,
                resources={"place": 1},
                rows_per_shard=given.rows_per_shard,
                quiet=True,
            )
            found = pa.concat_tables(ray.get(answered.to_arrow_refs())).sort_by("id")
        finally:
            done.set()
            disturber.join()
            stage.close()
        result.repeated = stage.noted("enter") - table.num_rows
    return found


def main() -> int:
    """Kill, compare and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill actors of a job on Ray, and lose a node.")
    add = parser.add_argument
    add("--rows", type=int, default=2000)
    add("--kills", type=int, default=20)
    add("--actors", type=int, default=3)
    add("--rows-per-shard", type=int, default=40)
    add("--max-tokens", type=int, default=8)
    add("--seed", type=int, default=0)
    given = parser.parse_args()
    table = questions(given.rows)
    drawn = np.sort(np.random.default_rng(given.seed).uniform(FIRST, LAST, given.kills) * given.rows)
    moments = sorted([*((int(rows), False) for rows in drawn), (given.rows // 2, True)])
    result = Result(given.rows, given.actors)
    with redirect_stdout(sys.stderr):  # Ray has much to say about processes that die
        begun = time.perf_counter()
        expected = answer(table, given, [], result)
        result.undisturbed_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        found = answer(table, given, moments, result)
        result.seconds = time.perf_counter() - begun
    result.most_attempts = max(found["attempts"].to_pylist())
    expected, answered = expected.select(list(COLUMNS)), found.select(list(COLUMNS))
    result.different = differences(expected, answered)
    for one, other in zip(expected.to_pylist(), answered.to_pylist()):
        if one != other:
            print(f"{one} became {other}", file=sys.stderr)
    good = result.good and (result.kills, result.nodes_lost) == (given.kills, 1)
    print(json.dumps(asdict(result) | {"good": good}))
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
