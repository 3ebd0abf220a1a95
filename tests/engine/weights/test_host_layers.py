"""Layers that come from the host's memory compute what they do where all of them stay on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmbatch.engine.weights.host_layers import HostLayers, PlainCopies
from llmbatch.engine.weights.residency import StreamedWeights

WIDTH = 8
LAYER = 4 * WIDTH * WIDTH  # bytes of its matrix, a multiple of 256
CPU = torch.device("cpu")


class LateCopies(PlainCopies):
    """Copies that are made when they are waited for, as late as a device may make them; and what was begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.locked: list[int] = []

    def lock(self, source: torch.Tensor) -> None:
        self.locked.append(source.nbytes)

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        self.begun += 1
        target.fill_(255)  # nothing reads what is on its way

        def arrive() -> None:
            target.copy_(source)

        return arrive


def layers_of(count: int) -> nn.ModuleList:
    torch.manual_seed(count)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)).requires_grad_(False)


def stored(layers: nn.ModuleList, memory: int, copies: PlainCopies) -> tuple[HostLayers, StreamedWeights | None]:
    hosted = HostLayers(memory, CPU, copies)
    for layer in layers:
        hosted.store(layer)
    streamed = hosted.open(0)
    hosted.follow(list(layers))
    return hosted, streamed


def run(layers: nn.ModuleList, first: int = 0, end: int | None = None) -> torch.Tensor:
    state = torch.ones(1, WIDTH)
    for layer in layers[first:end]:
        state = layer(state)
    return state


@given(st.integers(1, 7), st.integers(0, 9), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=4))
def test_layers_compute_the_same_wherever_a_forward_begins_and_ends(
    count: int, kept: int, parts: list[tuple[int, int]]
) -> None:
    layers = layers_of(count)
    whole = copy.deepcopy(layers)
    stored(layers, kept * LAYER, LateCopies())
    for first, end in [(0, count), *parts, (0, count), (0, count)]:
        assert torch.equal(run(layers, first, end), run(whole, first, end))


def test_each_step_brings_each_layer_once_and_the_first_ahead() -> None:
    copies = LateCopies()
    _, streamed = stored(layers := layers_of(5), 4 * LAYER, copies)
    assert streamed is not None
    assert (streamed.kept_bytes, streamed.streamed_bytes) == (4 * LAYER, 3 * LAYER)  # two stay beside two buffers
    assert copies.locked[:3] == [LAYER] * 3
    begun = copies.begun
    run(layers)
    run(layers)
    assert copies.begun - begun == 6


def test_layers_that_fit_stay() -> None:
    copies = LateCopies()
    _, streamed = stored(layers := layers_of(5), 5 * LAYER, copies)
    assert streamed is None
    run(layers)
    assert (copies.begun, copies.locked) == (0, [])


def test_what_takes_the_place_of_a_layer_has_its_weights() -> None:
    layers = layers_of(4)
    whole = copy.deepcopy(layers)
    hosted, _ = stored(layers, 0, LateCopies())
    replaced = nn.ModuleList(nn.Sequential(layer) for layer in layers)
    hosted.follow(list(replaced))
    assert torch.equal(run(replaced), run(whole))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_a_card_come_before_what_waits_for_them() -> None:
    from llmbatch.engine.weights.host_layers import CopyStream

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(6)).requires_grad_(False)
    whole = copy.deepcopy(layers).to(device)
    hosted = HostLayers(0, device, CopyStream(device))
    for layer in layers:
        hosted.store(layer.to(device))
    hosted.open(0)
    hosted.follow(list(layers))
    with torch.inference_mode():
        for _ in range(20):
            state = expected = torch.ones(64, 4096, device=device)
            for layer, other in zip(layers, whole, strict=True):
                state, expected = layer(state), other(expected)
            assert torch.equal(state, expected)
