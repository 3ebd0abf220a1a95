"""`map_dataset` where rows kill processes, nodes are lost and drivers are killed: on real Ray, several minutes long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from ray.cluster_utils import Cluster  # noqa: E402

from llmbatch import LLMOperator  # noqa: E402
from tests.support.models import tiny_tokenizer  # noqa: E402
from tests.support.ray_jobs import Job, answered, rows_of, start, until, when_running  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, about its settings
]
DEADLY = "\a"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head with the driver and all CPUs."""
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def operator(model: str, **options: Any) -> Any:
    given: dict[str, Any] = {
        "model": model,
        "prompt": "text",
        "kv_memory": 2**24,
        "dtype": "float32",
    }  # bfloat16 rounds by batch
    return cast(Any, LLMOperator(**given | options))


def die_of(token: int) -> Callable[[], None]:
    """What each process of Ray is to do first. A function in a function is sent whole, not by its name."""

    def change_engine() -> None:
        from llmbatch.engine.recorded import RecordedEngine

        execute = RecordedEngine.execute

        def deadly(self: Any, step: Any) -> Any:
            requests = self._requests
            for request in step.requests.tolist():
                if token in requests.tokens[requests.offsets[request] : requests.offsets[request + 1]]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return execute(self, step)

        RecordedEngine.execute = deadly  # type: ignore[method-assign]

    return change_engine


def test_rows_that_kill_the_process_get_an_error_and_all_others_their_answers(cluster: Any, model: str) -> None:
    [token] = tiny_tokenizer()(DEADLY)["input_ids"]
    start(address=cluster.address, runtime_env={"worker_process_setup_hook": die_of(token)})
    table = rows_of(900)
    texts = table["text"].to_pylist()
    texts[17] += DEADLY
    texts[601] += DEADLY
    table = table.set_column(1, "text", pa.array(texts))
    op = operator(model, engine="simulated", max_tokens=30)
    job = Job(ray.data.from_arrow(table).repartition(4), op, concurrency=2, num_cpus=0.1, rows_per_shard=150)
    found = answered(job.ds)
    assert found["text"].equals(table["text"])
    kinds = found["error_kind"].to_pylist()
    assert [i for i, kind in enumerate(kinds) if kind is not None] == [17, 601]
    assert (kinds[17], kinds[601]) == ("engine", "engine")
    assert found["attempts"].take([17, 601]).to_pylist() == [7, 7]
    assert 7 <= job.counts().deaths <= 14


def test_a_node_that_is_lost_costs_what_was_in_flight_there(cluster: Any, model: str) -> None:
    nodes = [cluster.add_node(num_cpus=0, resources={"place": 1}) for _ in range(3)]
    start(address=cluster.address)
    table = rows_of(300).append_column("payload", pa.array(["x" * 5000] * 300))  # blocks that live on their node
    op = operator(model, max_tokens=60, ignore_eos=True)
    job = Job(
        ray.data.from_arrow(table).repartition(4),
        op,
        concurrency=2,
        num_cpus=0,
        resources={"place": 1},
        rows_per_shard=30,
    )
    lost: list[str] = []

    def remove(process: int) -> None:
        until(lambda: job.counts().answered >= 60)
        home = next(home for home in ray.get(job.ledger.homes.remote()) if home.file.endswith(f"-{process}"))
        cluster.remove_node(next(node for node in nodes if node.node_id == home.node), allow_graceful=False)
        lost.append(home.node)

    remover = when_running(10, remove)
    found = answered(job.ds)
    remover.join()
    assert len(lost) == 1
    told = ["id", "text", "generated_text", "finish_reason", "error"]
    assert found.select(told).equals(op(table).select(told))
    counts = job.counts()
    assert (counts.answered, counts.deaths) == (300, 0)  # no row is suspected of what happened to the node


PROGRAM = """
import sys
import ray
from llmbatch import LLMOperator
from llmbatch.operators.ray import map_dataset
from ray.data.checkpoint import CheckpointConfig

address, model, source, target, checkpoints = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
context = ray.data.DataContext.get_current()
context.checkpoint_config = CheckpointConfig("id", checkpoints, delete_checkpoint_on_success=False)
op = LLMOperator(model=model, prompt="text", dtype="float32", kv_memory=2**24, max_tokens=60, ignore_eos=True)
ds = map_dataset(ray.data.read_parquet(source), op, concurrency=1, num_cpus=0.1, rows_per_shard=20)
ds.write_parquet(target)
"""


def test_a_job_goes_on_from_ray_datas_checkpoints(cluster: Any, model: str, tmp_path: Path) -> None:
    table = rows_of(400)
    source, target, checkpoints = tmp_path / "in.parquet", tmp_path / "out", tmp_path / "checkpoints"
    pq.write_table(table, source)
    arguments = [cluster.address, model, source, target, checkpoints]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        until(lambda: len(committed(checkpoints)) >= 3 or driver.poll() is not None)
        driver.kill()
    done = sum(pq.read_metadata(path).num_rows for path in committed(checkpoints))
    assert 0 < done < 400
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    found = pq.read_table(target).sort_by("id")
    told = ["id", "text", "generated_text", "finish_reason", "error"]
    op = operator(model, max_tokens=60, ignore_eos=True)
    assert found.select(told).equals(op(table).select(told))


def committed(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.rglob("*.parquet") if not path.name.endswith(".pending.parquet")]
