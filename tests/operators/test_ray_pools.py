"""Pools of actors that grow and shrink, on real Ray: every row once with its answer, whoever joins late or leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from llmbatch import LLMOperator  # noqa: E402
from llmbatch.operators.ray import dataset  # noqa: E402
from llmbatch.operators.ray.lending.place import Place  # noqa: E402
from llmbatch.operators.ray.sharding import Shards  # noqa: E402
from tests.support.ray_jobs import Job, answered, kill, rows_of, until  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_of_two_cpus"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, about its settings
]
TOLD = ["id", "text", "generated_text", "finish_reason", "error"]
LONG, SHORT = 60, 2  # tokens
SHARDS = 6  # that Ray Data gives an actor of a pool that may grow before it begins another one


def operator(model: str, **options: Any) -> Any:
    given: dict[str, Any] = {"model": model, "prompt": "text", "dtype": "float32", "ignore_eos": True}
    return cast(Any, LLMOperator(**given | options))


def cut_long_and_short(outlines: pa.Table, *_: Any, **__: Any) -> Shards:
    """Cut rows into shards of long ones, as many as an actor is given at once, and two of short ones."""
    order = np.argsort(outlines["row"].to_numpy())
    long = outlines["max_tokens"].to_numpy()[order] == LONG
    shard = np.where(long, np.cumsum(long) % SHARDS, SHARDS + np.cumsum(~long) % 2).astype(np.int32)
    return Shards(SHARDS + 2, outlines["row"].to_numpy()[order], shard)


def waiting_actor(folder: Path) -> type:
    """What an actor is, but that the one that loads first waits until it is asked to lend every second row.

    Who has begun such rows makes `lent` in the folder. No engine takes another step then before there is `killed`.
    """

    class Waiting(dataset._Actor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from llmbatch.operators.ray import actor
            from llmbatch.operators.ray.lending.borrowed import BorrowedRows
            from llmbatch.runtime import active_run

            engine = actor.SharedEngine
            begun, after_step, seconds_left = BorrowedRows.begun, engine.after_step, engine.seconds_left
            first, lent, killed = (folder / name for name in ("first", "lent", "killed"))
            is_first = not first.exists()
            first.touch()

            def told(self: Any, rows: Any) -> None:
                lent.touch()
                begun(self, rows)

            def held(self: Any) -> None:
                until(lambda: killed.exists() or not lent.exists())
                after_step(self)

            def asked(self: Any, seconds: float) -> None:
                seconds_left(self, seconds)
                until(lambda: not is_first or self.lends or killed.exists())

            patched: list[tuple[Any, str, Any]] = [
                (BorrowedRows, "begun", told),
                (engine, "after_step", held),
                (engine, "seconds_left", asked),
                (actor, "_PREDICTED", 0.0),
                (active_run, "rows_to_move", lambda left, *_: left.rows[::2]),
            ]
            for where, name, value in patched:
                setattr(where, name, value)
            super().__init__(*args, **kwargs)

    return Waiting


def open_loan(job: Job) -> tuple[int, int]:
    """The processes of the lender and the holder of the loan that is open."""

    def look(ledger: Any) -> list[tuple[str, str]]:
        return [(loan.lender, loan.holder) for loan in ledger._exchange._loans.values()]

    [(lender, holder)] = set(ray.get(job.ledger.__ray_call__.remote(look)))
    return int(lender.rpartition("-")[2]), int(holder.rpartition("-")[2])


@pytest.mark.parametrize("who", ["lender", "holder"])
def test_an_actor_that_joins_late_shares_the_rows_and_none_is_lost_with_one_that_dies(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    monkeypatch.setattr(dataset, "_Actor", waiting_actor(tmp_path))
    texts = rows_of(8 * SHARDS + 8)
    lengths = [LONG] * (8 * SHARDS) + [SHORT] * 8
    table = texts.append_column("params", pa.array([{"max_tokens": length} for length in lengths]))
    op = operator(model, sampling_params="params", kv_memory=2**24)
    job = Job(
        ray.data.from_arrow(table), op, concurrency=(1, 2), num_cpus=0.1, cut=cut_long_and_short, lends_at_once=True
    )
    ended = threading.Event()
    killed: list[int] = []

    def kill_one() -> None:
        until(lambda: (tmp_path / "lent").exists() or ended.is_set())
        if not ended.is_set():
            lender, holder = open_loan(job)
            killed.append(lender if who == "lender" else holder)
            kill(killed[0])
            (tmp_path / "killed").touch()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    found = answered(job.ds)
    ended.set()
    killer.join()
    assert len(killed) == 1, "no row moved"
    assert found.select(TOLD).equals(op(table).select(TOLD))
    counts = job.counts()
    assert (counts.answered, counts.deaths) == (table.num_rows, 1)


def test_batches_of_a_pool_that_grows_are_answered_once(model: str, tmp_path: Path) -> None:
    table = rows_of(96)
    op = operator(model, max_tokens=20, kv_memory=2**24)

    class Waiting(op):  # type: ignore[misc, valid-type]
        """Answers no second table before two actors have a first one."""

        def __call__(self, batch: pa.Table) -> pa.Table:
            (tmp_path / str(os.getpid())).touch()
            found = super().__call__(batch)
            until(lambda: len(list(tmp_path.iterdir())) >= 2)
            return found.append_column("process", pa.array([os.getpid()] * found.num_rows))

    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=2)
    ds = ray.data.from_arrow(table).repartition(12)
    found = answered(ds.map_batches(Waiting, compute=pool, num_cpus=0.1, batch_size=8, batch_format="pyarrow"))
    assert found.select(TOLD).equals(op(table).select(TOLD))
    assert len(set(found["process"].to_pylist())) == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two actors need a core each")
@pytest.mark.parametrize(("reserved", "are_apart"), [(1, True), (0.5, False)])
def test_actors_of_a_node_are_apart_where_each_has_a_core_of_its_own(reserved: float, are_apart: bool) -> None:
    class Actor:
        def place(self) -> Place:
            return Place.here()

    kind = ray.remote(num_cpus=reserved, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})(Actor)
    first, second = ray.get([actor.place.remote() for actor in [kind.remote(), kind.remote()]])
    assert first.is_apart(second) is are_apart
