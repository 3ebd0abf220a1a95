"""What each step will fetch is foretold by a model's shape, and said in a sentence or two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.weights.residency import StreamedWeights
from llmbatch.engine.weights.streamed_cost import expected_weights, streamed_cost, streaming_notes
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.residency import bytes_of_layers
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.work import weights_read

DENSE = find_shape("llama-3-8b")
MIXTURE = find_shape("mixtral-8x7b")
COST = CostModel(
    DENSE, Hardware(name="cpu", compute=1e12, bandwidth=1e12, memory=64e9), law="bytes", overlap=SEQUENTIAL
)
HALF = StreamedWeights(8_000_000_000, 7_000_000_000, 2e9)


def test_nothing_comes_where_all_layers_fit() -> None:
    assert expected_weights(DENSE, 17_000_000_000, lambda size: 1e9, is_host=True) is None


def test_what_stays_and_what_comes_are_the_weights_and_two_buffers() -> None:
    layer = bytes_of_layers(DENSE) / DENSE.layers
    expected = expected_weights(DENSE, 9_000_000_000, lambda size: 1e9, is_host=False)
    assert expected is not None
    assert expected.kept_bytes <= 9_000_000_000 < expected.kept_bytes + layer
    assert expected.kept_bytes + expected.streamed_bytes == pytest.approx(DENSE.weight_bytes + 2 * layer, rel=1e-6)


def test_of_a_mixture_experts_come_to_a_processor_and_layers_to_a_gpu() -> None:
    expert = MIXTURE.expert_bytes / (MIXTURE.layers * MIXTURE.experts)
    sizes = {True: expert, False: bytes_of_layers(MIXTURE) / MIXTURE.layers}
    for is_host, size in sizes.items():
        expected = expected_weights(MIXTURE, 40_000_000_000, lambda size: 1e9, is_host=is_host)
        assert expected is not None
        assert expected.streamed_bytes / size == pytest.approx(round(expected.streamed_bytes / size), abs=1e-6)
        assert expected.kept_bytes <= 40_000_000_000 < expected.kept_bytes + size


def test_a_step_takes_the_seconds_of_what_comes_more() -> None:
    for source in ("disk", "link"):
        more = streamed_cost(source, COST, HALF).rates.weight_seconds - COST.rates.weight_seconds
        assert more == pytest.approx(3.5)


def test_over_a_link_come_all_experts_whatever_tokens_choose() -> None:
    rates = streamed_cost("link", replace(COST, shape=MIXTURE, law="paper"), HALF).rates
    assert rates.weights_share_memory
    assert weights_read(rates, 1.0) == rates.weight_seconds


def test_what_comes_is_said() -> None:
    assert streaming_notes("link", 16_000_000, COST, HALF) == (
        "weights do not all fit in the memory for them: 8.00 GB stay there, and 7.00 GB come from the host's memory at "
        "each step, at 2.00 GB/s, beside the computation",
    )


def test_it_is_said_where_memory_holds_too_few_tokens_to_hide_it() -> None:
    slow = replace(HALF, bytes_per_second=1e8)
    hidden = 70.0 / COST.rates.seconds_per_token
    said = streaming_notes("disk", 160, COST, slow)[1]
    assert said == (
        f"the disk is too slow for this: 7.00 GB at 0.10 GB/s take 70.0 s, as long as the products of {hidden:,.0f} "
        "tokens, and KV memory holds 160; raise weights_memory or kv_memory (--weights-memory, --kv-memory), or take a "
        "faster disk"
    )
    fewer = "take weights of fewer bytes (--dtype fp8)"
    assert streaming_notes("link", 160, COST, slow, host_may_attend=True)[1].endswith(
        f"{fewer}, or keys and values in the host's memory (--kv host)"
    )
    assert streaming_notes("link", 160, COST, slow)[1].endswith(fewer)


@pytest.mark.parametrize(
    ("asked", "may"),
    [({}, True), ({"kv": "host"}, False), ({"dtype": "float16"}, False), ({"kv_cache_dtype": "fp8"}, False)],
)
def test_a_host_is_named_where_it_could_attend(asked: dict[str, Any], may: bool) -> None:
    assert EngineConfig(**asked).host_may_attend is may
