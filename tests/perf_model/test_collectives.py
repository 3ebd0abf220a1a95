"""What devices that share a model say to each other takes time: a latency a sum, and the bytes of each token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmbatch.errors import ParameterError
from llmbatch.perf_model.collectives import LATENCY, on_joined
from llmbatch.perf_model.shape import find_shape
from tests.support.workloads import COST


def test_one_device_says_nothing() -> None:
    assert on_joined(COST, 1) == COST


def test_a_step_has_two_sums_a_layer() -> None:
    joined = on_joined(COST, 4)
    assert joined.rates.step_seconds - COST.rates.step_seconds == pytest.approx(2 * COST.shape.layers * LATENCY)


@pytest.mark.parametrize(("cards", "share"), [(2, 1 / 2), (8, 7 / 8)])
def test_each_token_is_sent_twice_but_for_a_devices_own_part(cards: int, share: float) -> None:
    cost = replace(COST, shape=find_shape("deepseek-r1"))  # whose attention is wider than its hidden states
    hardware = cost.hardware
    assert hardware.link is not None
    numbers = 2 * 61 * 2 * 7168 * share
    hidden = replace(cost, hardware=hardware.group(cards)).rates.seconds_per_token
    assert on_joined(cost, cards).rates.seconds_per_token - hidden == pytest.approx(2 * numbers / hardware.link)


def test_devices_share_weights_and_memory() -> None:
    joined = on_joined(COST, 4)
    assert joined.rates.weight_seconds == pytest.approx(COST.rates.weight_seconds / 4)
    assert joined.hardware.memory == 4 * COST.hardware.memory


def test_a_link_must_be_known() -> None:
    apart = replace(COST, hardware=replace(COST.hardware, link=None))
    with pytest.raises(ParameterError) as raised:
        on_joined(apart, 2)
    assert str(raised.value) == (
        "link of devices that share a model must be known, got None for 2 x a100-80gb: give it (Hardware.link)"
    )
