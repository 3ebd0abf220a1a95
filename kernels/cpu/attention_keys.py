"""Brings the keys and values of a tile of attention: where they are, or copied side by side."""

from __future__ import annotations

from typing import Any

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.blocks import HIGH, LOW, SEQUENCE
from llmbatch.kernels.cpu.layout import UNIT
from llmbatch.kernels.cpu.pages import clear_last, find_units, gather_keys, gather_values, widen_tile
from llmbatch.kernels.cpu.tiles.softmax import TILE


@compiled(nogil=True, forceinline=True, counted=False)
def bring_keys(
    pages: Any, tables: Any, slot: int, head: int, low: int, high: int, in_place: bool, s: Any, place: int
) -> None:
    """Copy the keys [low, high) and their values, or what cannot be read in place of them; `place` is their units'."""
    n = high - low
    odd = s.numbers.itemsize == 2 and n % 2 == 1
    if pages.memory.itemsize < s.numbers.itemsize:
        widen_tile(pages, s.numbers, n, s.units, place, 1 - place, s.keys, s.values)
        if odd:
            clear_last(s.values, n)
    elif not in_place:
        gather_keys(pages, tables, slot, head, low, high, s.keys.ctypes.data, 4 * s.keys.shape[1])
        gather_values(pages, tables, slot, head, low, high, s.values)
        if odd:
            clear_last(s.values, n)
    elif odd:
        whole = n // UNIT * UNIT
        gather_values(pages, tables, slot, head, low + whole, high, s.values)
        clear_last(s.values, n - whole)
        s.units[place, 1, n // UNIT] = s.values.ctypes.data


@compiled(nogil=True, forceinline=True, counted=False)
def find_first_units(
    pages: Any, tables: Any, slots: Any, runs: Any, run: int, head: int, units: Any, place: int
) -> None:
    """Find the units of the first tile of a run (`find_units`)."""
    low = runs[run, LOW]
    slot, high = slots[runs[run, SEQUENCE]], min(low + TILE, runs[run, HIGH])
    find_units(pages, tables, slot, head, low, high, units, place)


@compiled(nogil=True, forceinline=True, counted=False)
def find_next_units(
    pages: Any, tables: Any, slots: Any, runs: Any, run: int, after: int, head: int, after_head: int, low: int,
    units: Any, place: int,
) -> None:  # fmt: skip  # arguments in groups
    """Find the units of the tile of a run from the key `low` on, or of the first one of the run `after` it."""
    if low < runs[run, HIGH]:
        high = min(low + TILE, runs[run, HIGH])
        find_units(pages, tables, slots[runs[run, SEQUENCE]], head, low, high, units, place)
    else:
        find_first_units(pages, tables, slots, runs, after, after_head, units, place)
