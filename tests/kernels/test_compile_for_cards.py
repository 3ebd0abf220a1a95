"""Kernels compile for cards that are not there, and take what those cards have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

TILE_BYTES = 64 * 128 * 2  # of keys, and of values
REGISTERS = 1 << 16  # of a multiprocessor, given to a warp by eights a thread
WARP = 32
E4M3 = 89  # the first capability that has it


class Card(NamedTuple):
    """What a compute capability allows."""

    shared: int  # bytes of a program
    decodes: int  # programs of decodes, of heads of 128 elements, that are to fit a multiprocessor
    e4m3: int = 2  # likewise, over pages of e4m3


CARDS = {80: Card(163 << 10, 2), 90: Card(227 << 10, 3), 100: Card(227 << 10, 3)}

# Of a thread, at most, whatever the card; kernels that are not named may take all 255.
MOST_REGISTERS = {
    "attend bf16 64 one": 80, "attend bf16 64 many": 168, "attend bf16 128 one": 160, "attend fp16 128 one": 160,
    "attend one with every feature": 160, "merge": 72, "norm": 64, "gate": 48, "rotate": 48,
    "rotate with norms": 64, "best": 128, "draw": 184, "quantise 4096": 48, "quantise 32768": 128,
    "attend e4m3 64 one": 160, "attend e4m3 64 many": 168, "attend e4m3 128 one": 224, "attend e4m3 128 many": 176,
    "attend e4m3 256 one": 184, "rotate to e4m3": 48, "rotate to e4m3 with norms": 64,
}  # fmt: skip  # a table
# Bytes of a thread, at most; kernels that are not named spill nothing. Heads of 256 in float32 spill 7,072 on Hopper by
# Triton 3.6, and 1,016 by 3.9.
MOST_SPILLED = {
    "attend bf16 256 many": 128, "attend with every feature": 128, "draw": 64, "attend fp32 64 many": 64,
    "attend e4m3 64 many": 32, "attend e4m3 with every feature": 160, "attend e4m3 one with every feature": 128,
    "attend fp32 128 one": 512, "attend fp32 128 many": 768, "attend fp32 256 many": 7168,
    "grid bf16 128": 96, "grid e4m3 128": 96, "grid fp32 64": 64, "grid fp32 128": 256, "grid fp32 256": 256,
    "grid with every feature": 256,
}  # fmt: skip  # a table


class Program(NamedTuple):
    """What a program of a kernel takes."""

    registers: int
    shared: int
    spilled: int


Kernels = dict[str, Program]


@pytest.fixture(
    scope="module", params=[(90, False), *(pytest.param((card, True), marks=pytest.mark.slow) for card in CARDS)]
)
def compiled(request: pytest.FixtureRequest) -> tuple[int, bool]:
    """A capability, and whether every kernel is compiled or those of most jobs."""
    found: tuple[int, bool] = request.param
    return found


@pytest.fixture(scope="module")
def capability(compiled: tuple[int, bool]) -> int:
    return compiled[0]


@pytest.fixture(scope="module")
def kernels(compiled: tuple[int, bool], tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels, compiled for the capability."""
    capability, every = compiled
    folder = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compilation", str(capability), *["every"] * every]
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name: Program(*taken) for name, taken in json.loads(told).items()}


def test_shared_memory_fits(kernels: Kernels, capability: int) -> None:
    assert max(taken.shared for taken in kernels.values()) <= CARDS[capability].shared


def test_two_tiles_are_on_their_way_while_one_is_attended(kernels: Kernels, capability: int) -> None:
    assert kernels["attend bf16 128 one"].shared >= 4 * TILE_BYTES
    if capability >= E4M3:
        assert kernels["attend e4m3 128 one"].shared >= 4 * TILE_BYTES  # of half the bytes, and twice the keys


def test_registers_are_as_many_as_planned(kernels: Kernels) -> None:
    assert {
        name: kernels[name].registers
        for name, most in MOST_REGISTERS.items()
        if name in kernels and kernels[name].registers > most
    } == {}


def test_little_is_spilled_and_nothing_where_it_matters(kernels: Kernels) -> None:
    assert {name: taken.spilled for name, taken in kernels.items() if taken.spilled > MOST_SPILLED.get(name, 0)} == {}


def test_so_many_programs_of_decodes_fit_a_multiprocessor(kernels: Kernels, capability: int) -> None:
    card, taken = CARDS[capability], kernels["attend bf16 128 one"]
    assert card.decodes * taken.registers * 4 * WARP <= REGISTERS
    assert card.decodes * taken.shared <= card.shared


def test_so_many_programs_of_decodes_over_e4m3_fit_a_multiprocessor(kernels: Kernels, capability: int) -> None:
    if capability >= E4M3:
        card, taken = CARDS[capability], kernels["attend e4m3 128 one"]
        assert card.e4m3 * taken.registers * 4 * WARP <= REGISTERS
        assert card.e4m3 * taken.shared <= card.shared


def test_on_hopper_a_program_of_decodes_fits_beside_a_block(kernels: Kernels, capability: int) -> None:
    if capability == 90:
        decode = kernels["attend bf16 128 one"]
        for block in (kernels["attend bf16 128 many"], kernels["grid bf16 128"]):
            assert (block.registers * 8 + decode.registers * 4) * WARP <= REGISTERS
            assert block.shared + decode.shared <= CARDS[capability].shared
