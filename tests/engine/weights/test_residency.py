"""Where weights lie is decided by what they may take, and refused with the bytes that are wanted."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from llmbatch.engine.config import EngineConfig
from llmbatch.engine.weights.residency import kept_blocks, least_memory, spread, weights_memory
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import SEQUENTIAL, CostModel
from llmbatch.perf_model.hardware import Hardware
from llmbatch.perf_model.residency import with_streamed_weights
from llmbatch.perf_model.shape import ModelShape, find_shape
from llmbatch.scheduler.token_budget import budget_in_turn

DENSE = find_shape("llama-3-8b")
MIXTURE = find_shape("mixtral-8x7b")
TIED = find_shape("smollm2-135m")


def decide(shape: Any = DENSE, *, is_host: bool = True, free: float = 64e9, **options: Any) -> int | None:
    return weights_memory(EngineConfig(**options), shape, is_host=is_host, free=free)


def test_weights_that_fit_stay_in_memory() -> None:
    assert decide() is None
    assert decide(weights_memory=17_000_000_000) is None


def test_weights_that_do_not_fit_stream_in_the_memory_for_them() -> None:
    assert decide(weights_memory=8_000_000_000) == 8_000_000_000
    assert decide(free=16e9) == 8_000_000_000


def test_random_weights_stay_in_memory() -> None:
    assert decide(free=16e9, load_format="dummy") is None


def test_disk_is_taken_at_its_word() -> None:
    assert decide(weights="disk") == 32_000_000_000


def test_weights_take_no_more_than_they_need_of_what_they_may_take() -> None:
    assert decide(weights="disk", weights_memory=10**17) == DENSE.weight_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "ram"},
            "weights must be one of auto, resident, host, disk, got 'ram'",
        ),
        (
            {"weights": "host"},
            "weights must be resident, disk or auto on a processor, got 'host': its memory is the host's; take "
            "weights='disk' (--weights disk)",
        ),
        (
            {"weights": "resident", "weights_memory": 1000},
            "weights_memory must hold all weights, 16,060,000,000 bytes, where weights is resident, got 1,000: raise "
            "it (--weights-memory), or take weights='disk' (--weights disk)",
        ),
        (
            {"weights": "disk", "weights_memory": 1000},
            "weights_memory must hold two layers beside what is always in memory, 1,003,750,000 bytes, got 1,000: "
            "raise it (--weights-memory), or take a smaller dtype",
        ),
        (
            {"weights": "disk", "is_host": False},
            "weights must be resident, host or auto on a GPU, got 'disk': layers come to it from the memory of its "
            "host; take weights='host' (--weights host)",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(message)):
        decide(**options)


def test_of_a_mixture_two_experts_must_fit_beside_the_rest() -> None:
    apart = MIXTURE.expert_bytes / 256  # of 32 layers of 8
    assert least_memory(MIXTURE, is_host=True) == int(MIXTURE.weight_bytes - MIXTURE.expert_bytes + 2 * apart)


def test_a_processor_keeps_an_embedding_beside_the_head_that_it_was_tied_to() -> None:
    embedding = TIED.head_params * 2
    assert least_memory(TIED, is_host=True) - least_memory(TIED, is_host=False) == pytest.approx(embedding, abs=1)
    assert least_memory(DENSE, is_host=True) == least_memory(DENSE, is_host=False)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_head_keep_their_type_where_layers_have_a_smaller_one(tied: bool) -> None:
    config = SimpleNamespace(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=1000,
        tie_word_embeddings=tied,
    )
    shape = ModelShape.from_config(config, 2, 1)
    layer, embedding, norms = 4 * 64 * 64 + 3 * 64 * 256, 2 * 1000 * 64, 2 * 9 * 64
    assert least_memory(shape, is_host=False) == embedding * (2 - tied) + norms + 2 * layer
    assert least_memory(shape, is_host=True) == embedding * 2 + norms + 2 * layer


@pytest.mark.parametrize("shape", [DENSE, MIXTURE])
def test_of_any_model_two_layers_must_fit_on_a_gpu(shape: ModelShape) -> None:
    around = 2 * (shape.params_total - shape.params - shape.expert_bytes / 2 * 0.75 * bool(shape.experts))
    wanted = around + (shape.weight_bytes - around) / shape.layers * 2
    assert least_memory(shape, is_host=False) == pytest.approx(wanted, rel=1e-6)


def test_kv_memory_that_is_given_is_not_for_weights() -> None:
    assert decide(is_host=False, free=20e9, kv_memory=3_000_000_000) is None
    assert decide(is_host=False, free=20e9, kv_memory=5_000_000_000) == 15_000_000_000


@pytest.mark.parametrize("is_host", [True, False])
def test_kv_memory_that_leaves_no_room_for_two_layers_is_refused_by_its_name(is_host: bool) -> None:
    message = (
        "kv_memory must be at most 18,996,250,000 bytes, what two layers and what is always in memory leave of "
        "20,000,000,000 that are free, got 24,000,000,000: lower it (--kv-memory)"
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$") as raised:
        decide(is_host=is_host, free=20e9, kv_memory=24_000_000_000)
    assert (raised.value.option, raised.value.value) == ("kv_memory", 24_000_000_000)


def test_a_processor_has_memory_beside_weights_whatever_kv_takes() -> None:
    assert decide(free=16e9, kv_memory=8_000_000) == 8_000_000_000


def test_weights_get_two_layers_where_a_share_is_less() -> None:
    assert decide(MIXTURE, is_host=False, free=16e9) == least_memory(MIXTURE, is_host=False)


def test_more_than_a_gpu_has_is_refused() -> None:
    message = (
        "weights_memory must be at most what is free of the GPU, 8,000,000,000 bytes, got 9,000,000,000: lower it "
        "(--weights-memory)"
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(message)}$"):
        decide(is_host=False, free=8e9, weights_memory=9_000_000_000)


def test_a_gpu_keeps_what_fits_and_gives_kv_more_where_it_does_not() -> None:
    assert decide(is_host=False, free=17.5e9) is None
    assert decide(is_host=False, free=17e9) == 4_250_000_000
    assert decide(is_host=False, free=17e9, weights_memory=8_000_000_000) == 8_000_000_000


def test_half_the_memory_keeps_half_the_layers_but_for_buffers() -> None:
    assert kept_blocks(100, 20, 10) == 8
    assert kept_blocks(200, 20, 10) == 20
    assert kept_blocks(5, 20, 10) == 0


def test_layers_that_stay_are_spread() -> None:
    assert spread(8, 4) == [False, True] * 4
    assert sum(spread(7, 3)) == 3


def test_steps_grow_by_what_is_read_at_each() -> None:
    processor = Hardware(name="cpu", compute=1e12, bandwidth=1e12, memory=64e9)
    cost = CostModel(DENSE, processor, law="bytes", overlap=SEQUENTIAL)
    slow = with_streamed_weights(cost, 8e9, 5e7)
    seconds = slow.rates.weight_seconds
    assert seconds == pytest.approx(cost.rates.weight_seconds + 160)
    hidden = seconds / slow.rates.seconds_per_token
    assert budget_in_turn(cost).step_tokens < budget_in_turn(slow).step_tokens == pytest.approx(2 * hidden, rel=0.1)
