"""A job takes the best split of the GPUs that are there, of those that its options allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.model.outline import KVType, NamedType, Outline, shape_on_gpus
from llmbatch.errors import ParameterError
from llmbatch.perf_model.hardware import GPUS, Hardware
from llmbatch.planning.workload import Scheduling
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.simulation.job_split import take_best_split
from llmbatch.simulation.splits import Offer

SCHEDULING = Scheduling(max_running=1024)
HOST = Hardware(name="host", memory=1e12, bandwidth=2e11, compute=1e12)
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


def llama(*shape: int) -> Outline:
    """A Llama in bfloat16 with the sizes of `FIELDS`, and heads of 128."""
    config = SimpleNamespace(**dict(zip(FIELDS, shape, strict=True)), head_dim=128, tie_word_embeddings=False)
    kv_bytes = 2 * 2 * 128 * config.num_key_value_heads * config.num_hidden_layers
    return Outline(config, NamedType("bfloat16", 2), 8192, kv_bytes, KVType("bfloat16", 2))


LLAMAS = {"8b": llama(4096, 14336, 32, 32, 8, 128256), "70b": llama(8192, 28672, 64, 80, 8, 128256)}  # 16 and 141 GB


def requests_of(rows: int = 30, *, tokens: int = 100, most: int = 60) -> RequestBatch:
    """Rows that share nothing."""
    rng = np.random.default_rng(0)
    offsets = np.arange(0, (rows + 1) * tokens, tokens)
    each, none = np.full(rows, most, np.int32), np.zeros(rows, np.int32)
    content = rng.integers(0, 50_000, rows * tokens).astype(np.int32)
    params = (SamplingParams(max_tokens=most),)
    return RequestBatch(content, offsets, each, none, params, np.arange(rows, dtype=np.uint64), none)


def planned(
    gpu: str,
    count: int,
    *,
    size: str = "8b",
    groups: tuple[int, ...] | None = None,
    copies: int | None = 1,
    host: Hardware | None = HOST,
    times: float = 1.0,
    **options: Any,
) -> tuple[EngineConfig, str]:
    offer = Offer(GPUS[gpu], count, groups=groups, most_copies=copies)
    given = EngineConfig(**options)
    return take_best_split(given, LLAMAS[size], requests_of(), offer, SCHEDULING, host=host, times=times)


def test_a_job_of_one_copy_shares_the_model_between_gpus_that_are_wired_to_each_other() -> None:
    config, note = planned("h100", 4)
    assert config == EngineConfig(tensor_parallel=4)
    assert note.startswith("the plan is 4 h100: ")
    assert "; the next best is 2 h100: " in note


def test_copies_on_each_gpu_do_more_rows_than_one_on_all_by_pci_express() -> None:
    config, note = planned("l40s", 4, copies=None, times=1000.0)
    assert config == EngineConfig()
    assert note.startswith("the plan is 4 x 1 l40s: ")


def test_a_pool_of_few_actors_has_few_copies() -> None:
    config, note = planned("h100", 4, copies=2, times=1000.0)
    assert config == EngineConfig(tensor_parallel=2)
    assert note.startswith("the plan is 2 x 2 h100: ")


def test_no_more_gpus_share_a_copy_than_heads_allow() -> None:
    config, _ = planned("h100", 8, groups=(1, 2))
    assert config.tensor_parallel == 2


def test_a_model_that_fits_no_gpu_is_shared() -> None:
    config, _ = planned("a100-80gb", 2, size="70b", times=1000.0)
    assert config.tensor_parallel == 2


@pytest.mark.parametrize("given", [{"dtype": "fp8"}, {"overlap": "interleaved"}])
def test_what_allows_no_ranks_leaves_a_copy_on_one_gpu(given: dict[str, str]) -> None:
    assert planned("h100", 4, **given)[0] == EngineConfig(**given)  # type: ignore[arg-type]


def test_keys_and_values_lie_in_the_hosts_memory_where_weights_do_and_a_host_is_described() -> None:
    given = {"size": "70b", "times": 1000.0}
    config, note = planned("l40s", 1, **given)  # type: ignore[arg-type]
    assert config == EngineConfig(kv="host")
    assert "1 l40s with weights, keys and values in the host's memory" in note
    assert planned("l40s", 1, host=None, **given)[0] == EngineConfig()  # type: ignore[arg-type]
    assert planned("l40s", 1, dtype="float16", **given)[0] == EngineConfig(dtype="float16")  # type: ignore[arg-type]


def test_types_of_weights_count() -> None:
    with pytest.raises(ParameterError, match="devices must hold the model"):
        planned("h100", 2, size="70b", groups=(2,), dtype="float32")
    assert planned("h100", 2, size="70b", groups=(2,))[0].tensor_parallel == 2


def test_pages_of_one_byte_hold_twice_the_tokens() -> None:
    two, one = (shape_on_gpus(LLAMAS["8b"], "auto", kv).kv_bytes_per_token for kv in ("auto", "fp8"))
    assert (two, one) == (131_072, 65_536)
