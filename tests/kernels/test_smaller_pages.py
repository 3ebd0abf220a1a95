"""Pages that hold smaller numbers than attention computes with: what is kept, and what attention makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.kernels.cpu.attention import attend
from llmbatch.kernels.cpu.blocks import GROUPS, cut_blocks
from llmbatch.kernels.cpu.fused import rotate_and_store
from llmbatch.kernels.cpu.layout import INT8_PACK, Pages, key_words, padded_width, page_shape, value_words
from tests.kernels.test_kernels import (
    Array,
    attention_by_hand,
    shared_step,
    to_bfloat16,
    to_float64,
    with_memory_behind,
)
from tests.support.examples import examples

KINDS = [("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")]  # of queries and of pages
WIDENED = np.dtype(np.uint32)  # rows of products, beside bfloat16
ELEMENTS: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.uint8}
PACKS = {"bfloat16": 2, "int8": INT8_PACK}
NOTHING: Array = np.empty(0, np.float32)


def as_kind(x: Array, kind: str) -> Array:
    return to_bfloat16(x) if kind == "bfloat16" else x.astype(np.float32)


def rounded_to_int8(x: Array) -> Array:
    """What remains of rows when each is kept as int8 and a float32 scale."""
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
    codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
    return np.asarray(codes * scale, np.float64)


class Kept:
    """A sequence or more in pages, written token by token as a layer writes them."""

    def __init__(self, kinds: tuple[str, str], totals: Array, *, heads: int, width: int, page_size: int, seed: int = 0):
        self.computed, self.kept = kinds
        rng = np.random.default_rng(seed)
        counts = -(-totals // page_size)
        order = rng.permutation(int(counts.sum()) + 3).astype(np.int32)
        self.tables = np.full((len(totals), int(counts.max())), 10**6, np.int32)
        firsts = np.cumsum(counts) - counts
        for i, count in enumerate(counts):
            self.tables[i, :count] = order[firsts[i] : firsts[i] + count]
        shape = page_shape(len(order), heads, width, page_size, PACKS[self.kept])
        memory = with_memory_behind(np.zeros(shape, ELEMENTS[self.kept]))
        self.pages = Pages(memory, width, page_size)
        self.given = []
        for i, total in enumerate(totals):
            packed = as_kind(rng.standard_normal((int(total), 2 * heads * width)).astype(np.float32), self.computed)
            places = np.arange(total)
            self.given.append(to_float64(packed).reshape(int(total), 2, heads, width))
            none = np.empty((int(total), 0), packed.dtype)
            rotate_and_store(
                packed, 0, none, none, NOTHING, NOTHING, 1e-6, self.tables[i, places // page_size],
                (places % page_size).astype(np.int32), self.pages,
            )  # fmt: skip

    def remains(self, i: int) -> tuple[Array, Array]:
        """Keys and values of a sequence as pages hold them, [heads, tokens, width]."""
        rounded = self.given[i] if self.kept == "bfloat16" else rounded_to_int8(self.given[i])
        if self.kept == "bfloat16":
            rounded = to_float64(to_bfloat16(rounded.astype(np.float32)))
        key, value = rounded.transpose(1, 2, 0, 3)
        return key, value


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_int8_pages_hold_a_scale_for_each_token_of_a_head(computed: str) -> None:
    heads, width, size = 2, 16, 8
    kept = Kept((computed, "int8"), np.array([21]), heads=heads, width=width, page_size=size)
    memory = kept.pages.memory
    begin, row = key_words(width, size, INT8_PACK), value_words(width, INT8_PACK)
    for t in range(21):
        page = memory[kept.tables[0, t // size]]
        place = t % size
        for head in range(heads):
            keys = page[head, :begin].reshape(width // 4 + 1, size, 4)
            scale = keys[-1, place].copy().view(np.float32)[0]
            got = (keys[:-1, place].ravel().astype(np.float64) - 128) * scale
            key, _ = kept.remains(0)
            np.testing.assert_allclose(got, key[head, t], rtol=1e-6, atol=1.01 * scale)
            assert np.abs(got - kept.given[0][t, 0, head]).max() <= 0.5001 * scale
            values = page[head, begin + place // 4 * row : begin + (place // 4 + 1) * row]
            scale = values[padded_width(width) + place % 4].copy().view(np.float32)[0]
            got = (values[:width, place % 4].astype(np.float64) - 128) * scale
            assert np.abs(got - kept.given[0][t, 1, head]).max() <= 0.5001 * scale


def check(
    kinds: tuple[str, str],
    sequences: list[tuple[int, int]],
    *,
    page_size: int,
    heads: int = 2,
    group: int = 3,
    width: int = 16,
    window: int = 0,
    widened: bool = False,
) -> None:
    starts, counts = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    kept = Kept(kinds, starts + counts, heads=heads, width=width, page_size=page_size)
    slots = np.arange(len(starts), dtype=np.int32)
    rng = np.random.default_rng(1)
    query = as_kind(rng.standard_normal((int(counts.sum()), heads * group * width)).astype(np.float32), kinds[0])
    out = np.empty_like(query)
    cut = cut_blocks(kept.tables, slots, starts, counts, page_size, group, window, 2, heads, GROUPS)
    products = WIDENED if widened else None
    attend(query, out, kept.pages, kept.tables, slots, cut, group, width**-0.5, window, 0.0, NOTHING, rows=products)
    got, asked = (to_float64(x).reshape(len(query), heads, group, width) for x in (out, query))
    rows = np.cumsum(counts) - counts
    tolerance = 2e-2 if kinds == ("float32", "int8") or kinds[0] == "bfloat16" else 1e-5
    for i, (start, count) in enumerate(sequences):
        chunk = slice(rows[i], rows[i] + count)
        key, value = kept.remains(i)
        expected = attention_by_hand(asked[chunk], key, value, start, width**-0.5, window, 0.0, NOTHING)
        np.testing.assert_allclose(got[chunk], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("page_size", [8, 16, 24, 64])
@pytest.mark.parametrize("window", [0, 12])
def test_attention_computes_with_what_pages_hold(kinds: tuple[str, str], page_size: int, window: int) -> None:
    mixed = [(0, 1), (5, 1), (63, 1), (64, 1), (200, 1), (0, 70), (33, 40), (7, 17)]
    check(kinds, mixed, page_size=page_size, window=window)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("heads", "group", "width"), [(1, 1, 64), (3, 3, 64), (2, 8, 128), (1, 1, 80), (1, 7, 24)])
def test_any_number_and_size_of_heads(kinds: tuple[str, str], heads: int, group: int, width: int) -> None:
    check(kinds, [(0, 1), (100, 1), (9, 30)], page_size=8, heads=heads, group=group, width=width)


def test_int8_meets_widened_rows() -> None:
    check(("bfloat16", "int8"), [(0, 1), (100, 1), (9, 30)], page_size=8, width=64, widened=True)


@examples(25)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), min_size=1, max_size=5),
    page_size=st.sampled_from([8, 40]),
    kinds=st.sampled_from(KINDS),
)
def test_any_step(sequences: list[tuple[int, int]], page_size: int, kinds: tuple[str, str]) -> None:
    check(kinds, sequences, page_size=page_size)


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_decodes_that_share_a_prefix_get_what_each_gets_alone(computed: str) -> None:
    heads, group, width, size = 2, 3, 64, 8
    rng = np.random.default_rng(0)
    tables, slots, starts, counts = shared_step(rng, size, [(5, 130), (70, 640)])
    shape = page_shape(int(tables.max()) + 1, heads, width, size, INT8_PACK)
    pages = Pages(with_memory_behind(np.zeros(shape, np.uint8)), width, size)
    total = shape[0] * size
    packed = as_kind(rng.standard_normal((total, 2 * heads * width)).astype(np.float32), computed)
    places = np.arange(total, dtype=np.int32)
    none = np.empty((total, 0), packed.dtype)
    rotate_and_store(packed, 0, none, none, NOTHING, NOTHING, 1e-6, places // size, places % size, pages)
    query = as_kind(rng.standard_normal((int(counts.sum()), heads * group * width)).astype(np.float32), computed)
    outs = []
    for groups in (GROUPS, GROUPS._replace(rows=1000)):
        cut = cut_blocks(tables, slots, starts, counts, size, group, 0, 3, heads, groups)
        outs.append(np.empty_like(query))
        attend(query, outs[-1], pages, tables, slots, cut, group, width**-0.5, 0, 0.0, NOTHING)
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(computed: str, bad: float) -> None:
    """A row whose values are not finite must not get an answer from numbers that look fine."""
    width, size = 16, 8
    pages = Pages(with_memory_behind(np.zeros(page_shape(1, 1, width, size, INT8_PACK), np.uint8)), width, size)
    rows = np.ones((1, 3 * width), np.float32)
    rows[0, -1] = bad
    packed, zero = as_kind(rows, computed), np.zeros(1, np.int32)
    none = np.empty((1, 0), packed.dtype)
    rotate_and_store(packed, 1, none, none, NOTHING, NOTHING, 1e-6, zero, zero, pages)
    out = np.empty((1, width), packed.dtype)
    cut = cut_blocks(zero[None], zero, zero, zero + 1, size, 1, 0, 1, 1, GROUPS)
    attend(packed, out, pages, zero[None], zero, cut, 1, 0.25, 0, 0.0, NOTHING)
    assert not np.isfinite(to_float64(out)).any()
