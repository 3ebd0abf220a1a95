"""What a model costs whose experts are read by step, and whose weights lie in the host's memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmbatch.compilation.decorators import as_python
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import RESERVED, find_hardware
from llmbatch.perf_model.residency import Host, with_host_weights
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.step_bound import WorkLeft, compute_within, work_to_end
from llmbatch.perf_model.work import padding_of_many_rows, padding_seconds, step_parts, weights_read
from llmbatch.scheduler.token_budget import (
    MOST_TOKENS,
    TILE,
    BudgetRules,
    ClosedLoopBudget,
    Load,
    most_tokens,
    prices,
    steady_budget,
    step_tokens,
)

HOST = Host(memory=1e12, bandwidth=204.8e9, link=32e9)
CARD = CostModel(find_shape("mixtral-8x7b"), find_hardware("a5000"))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # billions, as their makers state
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.1),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-r1", 671.0, 37.5),
        ("kimi-k2", 1026.4, 32.6),
    ],
)
def test_shapes_with_experts_have_the_parameters_that_are_published(name: str, total: float, active: float) -> None:
    shape = find_shape(name)
    assert shape.params_total / 1e9 == pytest.approx(total, rel=0.002)
    assert (shape.params + 2 * shape.head_params) / 1e9 == pytest.approx(active, rel=0.03)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    rates = CARD.rates
    rest = rates.weight_seconds - rates.expert_seconds
    assert weights_read(rates, 0.0) == pytest.approx(rest)
    assert weights_read(rates, 1.0) == pytest.approx(rest + rates.expert_seconds * 2 / 8)
    assert weights_read(rates, 2.0) == pytest.approx(rest + rates.expert_seconds * (1 - (6 / 8) ** 2))
    assert weights_read(rates, 1000.0) == pytest.approx(rates.weight_seconds)


def test_a_model_without_experts_is_read_whole_by_any_step() -> None:
    rates = CostModel(find_shape("llama-3-8b"), find_hardware("h100")).rates
    read = weights_read(rates, np.array([1.0, 1000.0]))
    assert read.tolist() == [rates.weight_seconds] * 2


def drawn_padding(tokens: int) -> float:
    """Tiles of 64 rows beyond the rows themselves, of an expert in the mean, where one token in four is sent to it."""
    rows = np.random.default_rng(tokens).binomial(tokens, 2 / 8, 100_000)
    return float(np.mean(-(-rows // 64) - rows / 64))


@pytest.mark.parametrize("tokens", [1, 8, 64, 128])
def test_experts_with_few_rows_have_a_tile_each(tokens: int) -> None:
    rates = CARD.rates
    assert rates.tile_seconds == pytest.approx(2 * 64 * CARD.shape.expert_params / CARD.hardware.flops)
    expected = drawn_padding(tokens) * rates.tile_seconds
    assert padding_seconds(rates, float(tokens)) == pytest.approx(expected, rel=0.02)


def test_experts_with_many_rows_end_anywhere_in_a_tile() -> None:
    tokens = np.arange(2000, 2512, 8)  # two tiles of each expert
    expected = np.mean([drawn_padding(int(one)) for one in tokens]) * CARD.rates.tile_seconds
    found = padding_seconds(CARD.rates, tokens.astype(np.float64))
    assert found.mean() == pytest.approx(expected, rel=0.02)
    assert found.max() == pytest.approx(padding_of_many_rows(CARD.rates))


def test_a_step_of_few_rows_an_expert_is_starved_of_compute_and_one_of_16384_tokens_is_not() -> None:
    """DeepSeek-R1: 512 rows an expert saturate it (BatchGen, 7); 32 do not, though products hide the weights."""
    cost = CostModel(find_shape("deepseek-r1"), find_hardware("h20").group(16))
    tokens = np.array([1024.0, 16384.0])
    zeros = np.zeros(2)
    compute, _ = step_parts(cost.rates, tokens, zeros, zeros, zeros)
    assert weights_read(cost.rates, tokens)[0] < 0.35 * tokens[0] * cost.rates.seconds_per_token
    used = tokens * cost.rates.seconds_per_token / compute
    assert used[0] < 0.65
    assert used[1] > 0.95


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_nothing_is_filled_up_where_a_tile_is_a_row_or_there_are_no_experts(name: str) -> None:
    rows = CostModel(find_shape(name), replace(find_hardware("h100"), expert_tile=1 if "mix" in name else 64))
    assert padding_seconds(rows.rates, np.array([1.0, 7.0, 1000.0])).tolist() == [0.0, 0.0, 0.0]
    assert padding_of_many_rows(rows.rates) == 0.0


@pytest.mark.parametrize("tile", [64, 512])
def test_a_step_has_the_tokens_that_hide_in_tiles_of_experts_or_behind_the_weights(tile: int) -> None:
    rates = CostModel(find_shape("mixtral-8x7b"), replace(find_hardware("h100").group(2), expert_tile=tile)).rates
    _, _, free = prices(BudgetRules.of(ClosedLoopBudget(rates)))
    few = step_tokens(BudgetRules.of(ClosedLoopBudget(rates)), Load(8, 100.0, 1e-3, 1e3))
    assert few == pytest.approx(free, abs=TILE)
    least = max(rates.weight_seconds, rates.tile_seconds)
    dense = free * rates.seconds_per_token - free * rates.expert_share / tile * rates.tile_seconds
    assert as_python(step_parts)(rates, free, 0.0, 0.0, 0.0)[0] <= least + dense * 1.01
    more = as_python(step_parts)(rates, 1.5 * free, 0.0, 0.0, 0.0)[0]
    assert more > 1.1 * least


def test_a_bounded_step_computes_for_as_long_as_tiles_leave_it() -> None:
    rates = CARD.rates
    tokens = as_python(compute_within)(rates, 1.0, 1.0, 0.0) / rates.seconds_per_token
    assert as_python(step_parts)(rates, tokens, 0.0, 0.0, 0.0)[0] == pytest.approx(1.0)


def test_a_job_of_bounded_steps_has_tiles_to_fill_up_in_each() -> None:
    left = WorkLeft(compute=10.0, memory=0.0, compute_rate=0.0, memory_rate=0.0)
    _, _, total = as_python(work_to_end)(CARD.rates, 1.0, 1.0, left)
    assert total == pytest.approx(10.0 / (1.0 - padding_of_many_rows(CARD.rates)), rel=0.01)


@pytest.mark.parametrize(("pool", "binds"), [(2e6, "pool"), (1e8, "tiles")])
def test_steps_of_rows_of_one_kind_are_large_for_the_sake_of_tiles_but_no_larger_than_the_pool_asks_for(
    pool: float, binds: str
) -> None:
    cost = CostModel(find_shape("deepseek-r1"), find_hardware("h20").group(16))
    decided: Any = SimpleNamespace(density=30.0, optimal_seconds=3000.0)
    full = 30.0 * pool * cost.rates.seconds_per_kv_token / cost.rates.seconds_per_token
    tiles = (2 * padding_of_many_rows(cost.rates) * 3000.0 / 2048) ** 0.5 / cost.rates.seconds_per_token
    wanted = {"pool": full, "tiles": tiles}[binds]
    assert steady_budget(decided, cost, pool, 2048.0).step_tokens == pytest.approx(wanted, abs=TILE)


def test_weights_in_host_memory_come_over_the_link() -> None:
    seconds = CARD.shape.weight_bytes / (HOST.link * HOST.efficiency)
    assert with_host_weights(CARD, HOST, kv="device").cost.rates.weight_seconds == pytest.approx(seconds)
    assert with_host_weights(CARD, HOST, kv="host").cost.rates.weight_seconds == pytest.approx(seconds)


def test_kv_is_read_where_it_lies() -> None:
    of_device = with_host_weights(CARD, HOST, kv="device").cost.rates
    of_host = with_host_weights(CARD, HOST, kv="host").cost.rates
    assert of_device.seconds_per_kv_token == pytest.approx(CARD.rates.seconds_per_kv_token)
    far = CARD.shape.kv_bytes_per_token / (HOST.bandwidth * HOST.efficiency)
    assert of_host.seconds_per_kv_token == pytest.approx(far)


def test_kv_has_the_room_that_weights_leave() -> None:
    shape, memory = CARD.shape, CARD.hardware.memory
    two = 2 * (shape.weight_bytes - shape.expert_bytes * 7 / 8) / shape.layers
    assert with_host_weights(CARD, HOST, kv="device").kv_memory == pytest.approx(memory - RESERVED - two)
    assert with_host_weights(CARD, HOST, kv="host").kv_memory == pytest.approx(0.95e12 - shape.weight_bytes)


def test_steps_may_have_the_tokens_that_hide_a_link() -> None:
    assert most_tokens(CostModel(find_shape("llama-3-8b"), find_hardware("h100")).rates) == MOST_TOKENS
    rates = with_host_weights(CARD, HOST, kv="host").cost.rates
    hidden = rates.weight_seconds / rates.seconds_per_token
    assert 2 * hidden - 128 <= most_tokens(rates) <= 2 * hidden


def test_a_host_without_room_for_the_weights_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        with_host_weights(CARD, replace(HOST, memory=64e9), kv="host")
    assert str(caught.value) == (
        "memory of a host must hold the weights, got 64 GB for 93: take a host with more memory, or weights of fewer "
        "bytes"
    )


def test_a_device_without_room_for_two_layers_is_refused() -> None:
    small = replace(CARD, hardware=replace(CARD.hardware, memory=4.4e9))
    with pytest.raises(ParameterError) as caught:
        with_host_weights(small, HOST, kv="device")
    assert str(caught.value) == (
        "memory of a device must hold two layers, of experts two, got 4 GB for 0.9 and 4 of its own: take a larger "
        "device, or weights of fewer bytes"
    )


def test_a_host_without_a_link_is_refused() -> None:
    with pytest.raises(ParameterError) as caught:
        Host(memory=1e12, bandwidth=1e11, link=0.0)
    assert str(caught.value) == "link of a host must be positive, got 0.0"
