"""Operators and `map_dataset` on real Ray: every row once with its answer, whatever dies.

All that needs Ray is here: it takes seconds to start, and its processes some more to import what they run.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from llmbatch import DataError, LLMOperator, ParameterError  # noqa: E402
from llmbatch.inference.answers.schema import AnswerSchema  # noqa: E402
from llmbatch.inference.planners import outliner_options  # noqa: E402
from llmbatch.operators.ray import device_plan, map_dataset  # noqa: E402
from llmbatch.operators.ray.dataset import _check_sorted, _planner, _worker  # noqa: E402
from llmbatch.operators.ray.sharding import Shards  # noqa: E402
from tests.support.models import chat_model_folder  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.ray_jobs import Job, answered, flights, kill, rows_of, until, when_running  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("ray_of_two_cpus"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, about its settings
]


def operator(model: str, **options: Any) -> Any:
    given: dict[str, Any] = {
        "model": model,
        "prompt": "text",
        "kv_memory": 2**24,
        "dtype": "float32",
    }  # bfloat16 rounds by batch
    return cast(Any, LLMOperator(**given | options))


def test_rows_have_the_answers_of_an_undisturbed_run_when_an_actor_is_killed(model: str) -> None:
    op = operator(model, max_tokens=60, ignore_eos=True)
    table = rows_of(240)
    job = Job(ray.data.from_arrow(table).repartition(5), op, concurrency=2, num_cpus=0.1, rows_per_shard=40)
    killer = when_running(20, kill)
    found = answered(job.ds)
    killer.join()
    told = ["id", "text", "generated_text", "finish_reason", "error"]
    assert found.column_names == ["id", "text", *AnswerSchema().columns.names]
    assert found.select(told).equals(op(table).select(told))
    counts = job.counts()
    assert (counts.answered, counts.deaths) == (240, 1)
    assert counts.lost <= 120  # of the three shards that an actor has at most
    assert set(found["attempts"].to_pylist()) == {1, 2}


@pytest.mark.slow
def test_rows_move_to_an_actor_without_work_and_back_when_it_is_killed(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.data.DataContext.get_current(), "wait_for_min_actors_s", 60)
    # Few rows fit the memory at once, so those that wait gain by a move; all but a few are one actor's.
    op = operator(model, max_tokens=100, ignore_eos=True, kv_memory=2**19)
    table = rows_of(100)
    job = Job(
        ray.data.from_arrow(table).repartition(2), op, concurrency=2, num_cpus=0.1, cut=apart(96), lends_at_once=True
    )
    killed: list[int] = []
    ended = threading.Event()

    def kill_the_taker() -> None:
        until(lambda: ended.is_set() or (job.moved() > 0 and len(flights()) == 2))
        if not ended.is_set():
            there = flights()
            killed.append(min(there, key=lambda process: len(there[process])))
            kill(killed[0])

    killer = threading.Thread(target=kill_the_taker, daemon=True)
    killer.start()
    found = answered(job.ds)
    ended.set()
    killer.join()
    assert len(killed) == 1, "no row moved"
    told = ["id", "text", "generated_text", "finish_reason", "error"]
    assert found.select(told).equals(op(table).select(told))
    counts = job.counts()
    assert (counts.answered, counts.deaths) == (100, 1)


def test_equal_prompts_of_a_shard_that_ray_cuts_draw_for_themselves(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.data.DataContext.get_current(), "target_max_block_size", 20_000)
    op = operator(model, max_tokens=20, ignore_eos=True, temperature=1.0)
    data = [bytes([number]) * 2_000 for number in range(60)]
    table = pa.table({"text": ["Say something."] * 60, "data": data})
    found = map_dataset(ray.data.from_arrow(table), op, concurrency=1, quiet=True).materialize()
    assert found.num_blocks() > 1
    assert len({row["generated_text"] for row in found.take_all()}) == 60


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_an_actor_has_a_model_that_is_split_over_two_ranks(model: str) -> None:
    table = rows_of(40)
    whole, split = (operator(model, max_tokens=20, tensor_parallel=ranks) for ranks in (1, 2))
    job = Job(ray.data.from_arrow(table), split, concurrency=1, num_cpus=0.1)
    told = ["id", "text", "generated_text", "finish_reason", "error"]
    assert answered(job.ds).select(told).equals(whole(table).select(told))


def apart(rows: int) -> Callable[..., Shards]:
    """A cut into two shards, one of so many rows."""

    def cut(outlines: pa.Table, *_: Any, **__: Any) -> Shards:
        hashes = np.sort(outlines["row"].to_numpy())
        return Shards(2, hashes, (np.arange(len(hashes)) >= rows).astype(np.int32))

    return cut


READS_A_PROMPT = """
import sys
import pyarrow as pa
from llmbatch import LLMOperator
from llmbatch.operators.ray.dataset import _outline
operator = LLMOperator(model=sys.argv[1], prompt="text", max_tokens=4, tensor_parallel=2, dtype="float32")
assert _outline(pa.table({"text": ["a", "b"]}), options=operator.options)["tokens"].to_pylist() == [1, 1]
print("torch" in sys.modules)
"""


def test_who_reads_prompts_imports_no_torch(model: str) -> None:
    reader = subprocess.run([sys.executable, "-c", READS_A_PROMPT, model], capture_output=True, text=True)
    assert (reader.stdout, reader.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    "of_a_gpu",
    [
        {"dtype": "fp8", "kv_cache_dtype": "fp8"},
        {"dtype": "float16"},
        {"weights": "host", "weights_memory": 1, "kv": "host", "dtype": "bfloat16"},
    ],
)
def test_plans_are_made_where_there_is_no_gpu(model: str, of_a_gpu: dict[str, Any]) -> None:
    assert _planner(operator(model, **of_a_gpu).options).pool.num_pages > 0


def test_a_dataset_without_rows_stays_without(model: str) -> None:
    op = operator(model, engine="simulated")
    found = map_dataset(ray.data.from_arrow(rows_of(0)), op, concurrency=1, num_cpus=0.1, quiet=True).materialize()
    assert found.count() == 0
    assert found.schema().names == ["id", "text", *AnswerSchema().columns.names]


def test_what_is_wrong_is_said_before_anything_runs(model: str) -> None:
    ds = ray.data.from_arrow(rows_of(3))
    op = operator(model, engine="simulated")
    with pytest.raises(ParameterError, match=r"^map_dataset takes LLMOperator\(\.\.\.\), got <class 'int'>$"):
        map_dataset(ds, cast(Any, int), concurrency=1)
    expected = r"^concurrency must be a number of actors or a pair of the fewest and the most, at least 1, got "
    for concurrency in (0, (2, 1), (1, 2, 3), (0, 1), "2", 2.5):
        with pytest.raises(ParameterError, match=expected):
            map_dataset(ds, op, concurrency=cast(Any, concurrency))
    map_dataset(ds, op, concurrency=cast(Any, [1, 1]))
    with pytest.raises(ParameterError, match=r"^rows_per_shard must be at least 1, got 0$"):
        map_dataset(ds, op, concurrency=1, rows_per_shard=0)
    with pytest.raises(ParameterError, match=r"^resources must have no CPU, got 1: give it as num_cpus$"):
        map_dataset(ds, op, concurrency=1, resources={"CPU": 1})
    with pytest.raises(DataError, match=r"^the prompt column 'question' is not in the input"):
        map_dataset(ds, operator(model, engine="simulated", prompt="question"), concurrency=1)
    taken = ray.data.from_arrow(pa.table({"text": ["a"], "_llmbatch_shard": [1]}))
    with pytest.raises(
        DataError, match=r"^the dataset has a column '_llmbatch_shard', which map_dataset needs: rename it$"
    ):
        map_dataset(taken, op, concurrency=1)


@pytest.mark.parametrize("kind", [pa.list_(pa.string_view()), pa.run_end_encoded(pa.int32(), pa.string())], ids=str)
def test_a_column_that_cannot_be_sorted_along_is_refused_with_a_way_out(kind: pa.DataType) -> None:
    """Tables with such a column are no argument of tasks within pytest, where Ray refuses to pickle them."""
    for other in (pa.list_view(pa.string()), pa.map_(pa.string(), pa.int8()), pa.fixed_shape_tensor(pa.int8(), (2,))):
        _check_sorted(pa.field("seen", other))
    expected = f"columns must be of types that Arrow can sort along, got 'seen' of {kind}: cast it first, "
    with pytest.raises(DataError, match=f"^{re.escape(expected)}"):
        _check_sorted(pa.field("seen", kind))


def test_what_is_no_dataset_is_refused_with_what_makes_one(model: str) -> None:
    op, table = operator(model, engine="simulated"), rows_of(3)
    ds = ray.data.from_arrow(table)
    makes = r": ray\.data\.from_arrow\(table\) or ray\.data\.read_parquet\(path\) makes one, and the operator comes "
    for given, kind in ((table, "Table"), (table.to_pandas(), "DataFrame"), ("rows.parquet", "str")):
        with pytest.raises(ParameterError, match=f"^ds must be a Ray dataset, got {kind}{makes}"):
            map_dataset(cast(Any, given), op, concurrency=1)
    with pytest.raises(ParameterError, match=rf"^ds must be a Ray dataset, got LLMOperator\(model='.*'\){makes}"):
        map_dataset(op, cast(Any, ds), concurrency=1)
    with pytest.raises(ParameterError, match=r"^map_dataset takes LLMOperator\(\.\.\.\), got (Materialized)?Dataset$"):
        map_dataset(ds, cast(Any, ds), concurrency=1)


def test_actors_that_leave_no_cpu_are_warned_of(model: str) -> None:
    ds = ray.data.from_arrow(rows_of(0))
    with pytest.warns(UserWarning, match=r"^the actors take 2 of the cluster's 2 CPUs, and reading and sorting need"):
        map_dataset(ds, operator(model, engine="simulated"), concurrency=2, quiet=True)


def test_actors_that_leave_most_cpus_idle_are_warned_of(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0})
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"Resources": {"CPU": 12.0}}, {"Resources": {"CPU": 4.0}}, {"Resources": {}}]
    )
    ds = ray.data.from_arrow(rows_of(0))
    message = (
        r"^each actor computes on one of the cluster's 16 CPUs, since num_cpus is left out: num_cpus={} would give it"
    )
    counts: tuple[tuple[int | tuple[int, int], int], ...] = ((1, 12), (2, 7), ((1, 2), 7))
    for actors, each in counts:
        with pytest.warns(UserWarning, match=message.format(each)):
            map_dataset(ds, operator(model), concurrency=actors, quiet=True)


def test_actors_fill_the_cluster_where_nobody_says_how_many(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = map_dataset(ray.data.from_arrow(rows_of(3)), operator(model, engine="simulated", max_tokens=2))
    assert capsys.readouterr().err.startswith("map_dataset: 1 actor of 1 CPU, since concurrency is left out\n")
    assert found.count() == 3


def test_ranks_of_an_actor_reserve_a_core_each(model: str) -> None:
    ds = ray.data.from_arrow(rows_of(0))
    with pytest.warns(UserWarning, match=r"^the actors take 2 of the cluster's 2 CPUs, and reading and sorting need"):
        map_dataset(ds, operator(model, tensor_parallel=2), concurrency=1, quiet=True)


def test_ray_loads_the_model_once_per_actor(model: str) -> None:
    operator = LLMOperator(model=model, prompt="text", max_tokens=4, kv_memory=2**24)

    class Witness(operator):  # type: ignore[misc, valid-type]
        """Says in which process each row was answered, and with which engine."""

        def __call__(self, batch: pa.Table) -> pa.Table:
            from llmbatch.operators.workers import _workers

            answered = super().__call__(batch)
            workers: list[Any] = [shared.worker for shared in _workers.values()]
            where = f"{os.getpid()} {[id(worker.load().engine()) for worker in workers]}"
            return answered.append_column("where", pa.array([where] * answered.num_rows))

    rows = ray.data.from_items([{"id": i, "text": "abc"[: i % 3 + 1]} for i in range(40)])
    table = answered(rows.map_batches(Witness, concurrency=1, batch_size=10, batch_format="pyarrow"))
    assert table["id"].to_pylist() == list(range(40))
    assert len(set(table["where"].to_pylist())) == 1
    expected = operator(pa.table({"id": range(40), "text": ["abc"[: i % 3 + 1] for i in range(40)]}))
    assert table["generated_text"].to_pylist() == expected["generated_text"].to_pylist()


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_batches_of_every_format_have_answers_of_the_same_types(model: str, batch_format: str) -> None:
    op = operator(model, engine="simulated", max_tokens=2, n=2)
    rows = ray.data.from_arrow(pa.table({"id": range(4), "text": ["a", "b", None, "d"]}))
    batches = rows.map_batches(op, concurrency=1, batch_size=2, num_cpus=0.1, batch_format=batch_format)
    blocks = [block for block in ray.get(batches.to_arrow_refs()) if block.num_rows]
    columns = AnswerSchema(choices=True).columns
    assert [block.schema.field(name) for block in blocks for name in columns.names] == [*columns] * len(blocks)
    assert sum(block["error"].null_count for block in blocks) == 3


def test_the_example_curates_documents(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model = chat_model_folder(tmp_path / "model")
    program = runpy.run_path(str(ROOT / "examples" / "ray_curation.py"))
    texts = [f"{word} of part {part}" for part in range(2) for word in ("birch", "lamp", "a", "zz", "fjord", "0")]
    (tmp_path / "documents").mkdir()
    for part in range(2):
        rows = pa.table({"text": texts[6 * part : 6 * part + 6]})
        pq.write_table(rows, tmp_path / "documents" / f"{part}.parquet")
    program["main"](model, str(tmp_path / "documents"), str(tmp_path / "kept"))
    judge: Any = LLMOperator(
        model=model, template=program["ASK"], chat=True, structured_outputs={"choice": ["yes", "no"]}
    )
    answers = judge(pa.table({"text": texts}))["generated_text"].to_pylist()
    tables = map(pq.read_table, (tmp_path / "kept").glob("*.parquet"))
    kept = [text for table in tables for text in table["text"].to_pylist()]
    assert sorted(kept) == sorted(text for text, answer in zip(texts, answers) if answer == "yes")


def test_a_plan_of_a_cluster_without_gpus_is_copies_on_processors(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    op = operator(model, max_tokens=4)
    found = answered(map_dataset(ray.data.from_arrow(rows_of(20)), op, plan="auto", concurrency=1, num_cpus=0.5))
    assert found.num_rows == 20
    said = "map_dataset: the plan is copies on processors, since there is no GPU to plan for\n"
    assert said in capfd.readouterr().err


def test_the_plan_of_a_cluster_with_gpus_is_searched_with_the_first_rows(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0}] * 2
    monkeypatch.setattr(device_plan, "resources_of_nodes", lambda: nodes)
    op, ds = operator(model, max_tokens=4), ray.data.from_arrow(rows_of(20))
    options = op.options
    taken, note = device_plan.on_planned_devices(ds, options, _worker(outliner_options(options)), concurrency=3)
    assert taken == options
    assert note.startswith("the plan is 3 x 1 h100: ")


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        ({"plan": "best"}, {}, "plan must be one of given, auto, got 'best'"),
        ({"num_gpus": 1}, {}, "num_gpus must be left out where plan is auto, which decides it, got 1"),
        ({}, {"tensor_parallel": 2}, "tensor_parallel must be left out where plan is auto, which decides it, got 2"),
    ],
)
def test_what_a_plan_decides_is_left_out(model: str, given: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    op = operator(model, **asked)
    with pytest.raises(ParameterError) as raised:
        map_dataset(ray.data.from_arrow(rows_of(2)), op, **{"plan": "auto", **given})
    assert str(raised.value) == said
