"""Jobs of every kind, killed with SIGKILL at a file operation and run again, each in a process forked for it.

One process imports everything and runs one job, so that all is compiled and loaded. Each job after that is a fork of
it: it can be killed, and leaves what a real crash leaves, in a tenth of the time that a fresh interpreter takes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import llmbatch
import llmbatch.inference.answers.assembler
import llmbatch.inference.worker
import llmbatch.jobs.part_builder
from llmbatch.errors import DataError
from llmbatch.io.writing.manifest import decode
from llmbatch.storage.journal import Journal
from llmbatch.storage.local import NewFile
from llmbatch.storage.location import Location
from tests.support.jobs import SAME, begun, rows

ROWS = 12
OPERATIONS = (
    *((os, name) for name in ("replace", "unlink", "remove", "rmdir", "mkdir", "pwrite", "ftruncate", "open")),
    *((os, name) for name in ("fsync", "fdatasync")),
    (NewFile, "write"),
)
SIMULATED: dict[str, Any] = {
    "prompt": "text", "dtype": "float32", "engine": "simulated", "output_tokens": "n", "max_tokens": 90,
    "kv_memory": 2**22, "window_rows": 7, "max_running": 4,
}  # fmt: skip  # a table
OTHER = {"max_tokens": 7}  # of the command that an earlier output was made by


@dataclass(frozen=True, slots=True)
class Setup:
    """A command, and what lies at its output before it is run."""

    output: str = "out"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the job
    flags: Mapping[str, Any] = field(default_factory=dict)  # that the next run may be without
    before: str = "nothing"

    def __str__(self) -> str:
        words = [*(f"{key}={value}" for key, value in {**self.options, **self.flags}.items())]
        return f"{self.output} over {self.before}: {', '.join(words) or 'plain'}"


UNORDERED = {"preserve_order": False}
IDS = {"id_column": "id"}
SETUPS = (
    Setup(),
    Setup("out.parquet"),
    Setup("out.jsonl"),
    Setup("out.jsonl.zst", UNORDERED),
    Setup(options=UNORDERED),
    Setup(options={**UNORDERED, **IDS}),
    Setup("out.parquet", UNORDERED),
    Setup(options=IDS, before="other rows"),
    Setup(options=IDS, before="other rows begun"),
    Setup(options=UNORDERED | IDS, before="other rows"),
    Setup(flags={"changed_rows": "answer"}, before="changed rows"),
    Setup(flags={"retry_errors": True}, before="errors"),
    *(Setup(name, flags={"restart": True}, before="finished") for name in ("out", "out.parquet", "out.jsonl")),
    Setup(flags={"restart": True}, before="begun"),
    Setup(options=UNORDERED, flags={"restart": True}, before="begun"),
    Setup(options=UNORDERED, flags={"restart": True}, before="finished"),
    *(Setup(name, flags={"overwrite": True}, before="foreign") for name in ("out", "out.parquet")),
    Setup(flags={"overwrite": True}, before="finished"),
    Setup(options=UNORDERED, flags={"overwrite": True}, before="foreign"),
)  # fmt: skip  # arguments in groups


class Failure(Exception):
    """What must not be."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Where a process is killed."""

    operation: int  # counted from 0
    half: bool  # the operation is made, or half of it where it has halves


class Case:
    """A set-up in a folder, as it lies there before the command is run."""

    def __init__(self, setup: Setup, model: str, folder: Path) -> None:
        self.setup, self.model, self.folder = setup, model, folder
        self._start = folder / "start"
        self._start.mkdir(parents=True)
        self.at: Path = self._start
        self._prepare()
        self.expected = forked(self._undisturbed)
        self.operations: int = self._count()

    def run(self, rng: np.random.Generator) -> None:
        """Kill the command, perhaps the next one too, and check what the one after that makes of it."""
        self.begin_at(rng)
        flags = dict(self.setup.flags)
        kills: list[tuple[Kill, dict[str, Any]]] = []
        for given in [flags] if rng.random() < 0.7 else [flags, flags if rng.random() < 0.5 else {}]:
            kills.append((Kill(int(rng.integers(self.operations)), bool(rng.random() < 0.5)), given))
            forked(functools.partial(self.command, *kills[-1]))
        last = flags if rng.random() < 0.5 else {}
        try:
            forked(self._check_old)
            forked(functools.partial(self._go_on, last))
        except Failure as failure:
            raise Failure(f"{self.setup}, {kills}, then {last}, in {self.at}: {failure}") from None
        shutil.rmtree(self.at)

    def begin_at(self, rng: np.random.Generator) -> None:
        """Begin in a folder of its own."""
        self.at = self.folder / f"{rng.integers(1 << 30)}"
        shutil.copytree(self._start, self.at)

    def expected_old(self) -> list[dict[str, Any]] | None:
        """The rows of the output that was there before the command, if one was finished."""
        old = self._start / self.setup.output
        return read(old) if self.setup.before in ("finished", "errors") else None

    @property
    def out(self) -> Path:
        """Where it writes."""
        return self.at / self.setup.output

    @property
    def work(self) -> Path:
        """Where it works."""
        return self.out / "_llmbatch" if not self.out.suffix else self.at / f"{self.setup.output}._llmbatch"

    def execute(self, **given: Any) -> None:
        """Run the command, in this process."""
        options = {**SIMULATED, **self.setup.options, **given}
        llmbatch.run(str(self.at / "in.parquet"), options.pop("output", str(self.out)), model=self.model, **options)

    def _prepare(self) -> None:
        table, before = rows(ROWS), self.setup.before
        pq.write_table(table, self.at / "in.parquet")
        if before == "nothing":
            return
        if before == "foreign":
            target = self.out / "data.parquet" if not self.out.suffix else self.out
            target.parent.mkdir(exist_ok=True)
            pq.write_table(table.slice(0, 3), target)
            return
        if before == "changed rows":
            _put(self.at, table.set_column(1, "text", pa.array([f"old {i}" for i in range(ROWS)])))
        if before.startswith("other rows"):
            _put(self.at, rows(ROWS + 3).slice(5))
        if before == "errors":
            _put(self.at, table)
            forked(functools.partial(self.execute, row_timeout=1e-9))
            return
        other = OTHER if self.setup.flags.keys() & {"restart", "overwrite"} else {}
        kill = Kill(30, False) if before.endswith("begun") else None
        forked(functools.partial(self.command, kill, other))
        _put(self.at, table)

    def _undisturbed(self) -> list[dict[str, Any]]:
        self.execute(output=str(self.at / "undisturbed"))
        answers = read(self.at / "undisturbed")
        shutil.rmtree(self.at / "undisturbed")
        return answers

    def _count(self) -> int:
        self.at = self.folder / "count"
        shutil.copytree(self._start, self.at)

        def command() -> int:
            with _killed_at(None) as operations:
                self.execute(**self.setup.flags)
            return next(operations)

        number: int = forked(command)
        return number

    def command(self, kill: Kill | None, given: Mapping[str, Any]) -> None:
        """Run the command, and be killed."""
        with _killed_at(kill), contextlib.suppress(DataError):  # the command before, of another job
            self.execute(**given)

    def _check_old(self) -> None:
        """Until the new output is complete all of an earlier one is there."""
        ending = self.work / "ending.json"
        manifest = self.out / "_llmbatch.parquet" if not self.out.suffix else Path(f"{self.out}._llmbatch.json")
        committing = ending.exists() and json.loads(ending.read_bytes())["manifest"] is not None
        if committing or (manifest.exists() and _is_new(manifest)):
            return
        old = self._start / self.setup.output
        visible = [old] if old.is_file() else list(old.glob("*.parquet"))
        gone = [path.name for path in visible if not _same(path, self.at / path.relative_to(self._start))]
        if gone:
            raise Failure(f"{gone} went before the new output was there")

    def _go_on(self, given: Mapping[str, Any]) -> None:
        kept = self._kept() if not {"restart", "overwrite"} & set(given) else set()
        with begun() as answered:
            try:
                self.execute(**given)
            except DataError as error:
                asked = self.setup.flags or self.setup.before != "nothing"
                if given or not asked or self._has_job():
                    raise Failure(f"it does not go on: {error}") from None
                self.execute(**self.setup.flags)  # it died before it had said anything
                kept = set()
        if again := kept & answered:
            raise Failure(f"{sorted(again)} were answered, and are answered again")
        found = read(self.out)
        if not given and found == self.expected_old():  # so here
            self.execute(**self.setup.flags)
            found = read(self.out)
        if sorted(found, key=_id) != sorted(self.expected, key=_id):
            raise Failure(f"of {len(self.expected)} rows there are {len(found)}: {[row['id'] for row in found]}")
        if self.setup.options.get("preserve_order", True) and found != self.expected:
            raise Failure("the rows are in another order")
        if self.work.exists():
            raise Failure(f"of its work is left {os.listdir(self.work)}")

    def _has_job(self) -> bool:
        """Whether a job of this command has begun."""
        job = self.work / "job.json"
        return job.exists() and json.loads(job.read_bytes())["command"]["max_tokens"] == SIMULATED["max_tokens"]

    def _kept(self) -> set[str]:
        """Ids of the rows whose answers are kept by a job that was begun by this command."""
        place = Location.at(str(self.work))
        names = place.names()
        if "job.json" not in names or "ending.json" in names:
            return set()
        layout = json.loads(place.read("job.json") or b"")
        generation = f"{len(layout['earlier_window_rows']):03d}"
        if layout["command"]["max_tokens"] != SIMULATED["max_tokens"] or layout["without_errors"]:
            return set()
        ids = rows(ROWS)["id"].to_pylist()
        journals = {name[:17] for name in names if name.startswith(f"{generation}-journal")}
        wholes = {name for name in names if name.startswith(f"{generation}-window")}
        kept = set()
        for name in wholes:
            first = int(name[11:16]) * layout["window_rows"]
            kept |= set(ids[first : first + layout["window_rows"]])
        if not self.setup.options.get("id_column"):
            for name in journals:
                records = Journal.open(place, name).records()
                kept |= {ids[key] for record in records for key in record["key"].to_pylist()}
        return kept


def warm_up(model: str, folder: Path) -> None:
    """Load, compile and patch what the forks use: files, parts and windows of few rows."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    llmbatch.inference.answers.assembler.ROWS_AT_RISK = 2
    setattr(llmbatch.jobs.part_builder, "PART_ROWS", 3)  # noqa: B010
    pq.write_table(rows(ROWS), folder / "warm.parquet")
    for name in ("warm", "warm.jsonl"):
        llmbatch.run(str(folder / "warm.parquet"), str(folder / name), model=model, **SIMULATED)


@contextlib.contextmanager
def _killed_at(kill: Kill | None) -> Iterator[Iterator[int]]:
    """Count file operations, and die at one of them."""
    operations = count()

    def counting(owner: Any, name: str) -> Callable[..., Any]:
        function = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return function(*args, **options)
            if next(operations) == (-1 if kill is None else kill.operation):
                assert kill is not None
                if kill.half and name in ("pwrite", "write"):
                    function(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                elif kill.half:
                    function(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    originals = [(owner, name, getattr(owner, name)) for owner, name in OPERATIONS]
    for owner, name, _ in originals:
        setattr(owner, name, counting(owner, name))
    try:
        yield operations
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def forked(act: Callable[[], Any]) -> Any:
    """What a fork of this process returns; None where it was killed. Raises Failure where it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as answer:
            try:
                json.dump({"value": act()}, answer)
            except Failure as failure:
                json.dump({"failure": str(failure)}, answer)
            except BaseException:
                json.dump({"failure": traceback.format_exc()}, answer)
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    if not said:
        return None
    told = json.loads(said)
    if "failure" in told:
        raise Failure(told["failure"])
    return told["value"]


def _put(folder: Path, table: pa.Table) -> None:
    """Make this the input, by another name of the same file."""
    pq.write_table(table, folder / "in.parquet")


def _is_new(manifest: Path) -> bool:
    return bool(decode(manifest.read_bytes(), "")["command"]["max_tokens"] == SIMULATED["max_tokens"])


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of an output, as JSON values."""
    if ".jsonl" in out.name:
        codec = "zstd" if out.suffix == ".zst" else None
        lines = pa.input_stream(str(out), compression=codec).read().decode().splitlines()
        return [{name: json.loads(line)[name] for name in ("id", *SAME)} for line in lines]
    return list(pq.read_table(out).select(["id", *SAME]).to_pylist())


def _id(row: dict[str, Any]) -> str:
    return str(row["id"])
