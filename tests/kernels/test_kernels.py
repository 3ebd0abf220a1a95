"""Kernels equal a plain float64 computation of what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit as _njit
from numpy.typing import NDArray
from torch.nn import functional

from llmbatch.kernels.cascade import Groups
from llmbatch.kernels.cpu.attention import attend
from llmbatch.kernels.cpu.blocks import BLOCK_ROWS, GROUPS, HIGH, ROW, TOKENS, Blocks, cut_blocks
from llmbatch.kernels.cpu.fused import gate, normalize, rotate_and_store
from llmbatch.kernels.cpu.layout import Pages, key_words, padded_width, page_shape
from llmbatch.kernels.cpu.numerics import exp32, narrow, ordered, unordered, widen
from llmbatch.kernels.spec import GELU_TANH, SILU
from tests.support.examples import examples

Array = NDArray[Any]
njit: Callable[[Callable[..., None]], Callable[..., None]] = _njit


def to_bfloat16(x: Array) -> Array:
    bits: Array = torch.from_numpy(x.astype(np.float32)).bfloat16().view(torch.uint16).numpy()
    return bits


def to_float64(x: Array) -> Array:
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


@njit
def each_exp(x: Array, out: Array) -> None:
    for i in range(x.size):
        out[i] = exp32(x[i])


@njit
def each_round_trip(x: Array, out: Array) -> None:
    for i in range(x.size):
        out[i] = narrow(x[i], out[i])


@njit
def each_widened(x: Array, out: Array) -> None:
    for i in range(x.size):
        out[i] = widen(x[i])


@njit
def each_ordered(x: Array, out: Array, back: Array) -> None:
    for i in range(x.size):
        out[i] = ordered(x[i])
        back[i] = unordered(out[i])


def test_the_exponential_is_right_to_three_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 20_011, dtype=np.float32)
    out = np.empty_like(x)
    each_exp(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=3.6e-7)


def test_the_exponential_is_zero_far_below_zero_and_keeps_nan() -> None:
    x = np.array([-88, -1e30, -np.inf, np.nan], np.float32)
    out = np.empty_like(x)
    each_exp(x, out)
    np.testing.assert_array_equal(out, [0, 0, 0, np.nan])


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    x = np.random.default_rng(0).standard_normal(5_000).astype(np.float32)
    x[:4] = [0, -0.0, np.inf, np.nan]
    out, back = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float32)
    each_round_trip(x, out)
    each_widened(out, back)
    np.testing.assert_array_equal(back, torch.from_numpy(x).bfloat16().float().numpy())


def test_ordered_keys_sort_as_floats_do() -> None:
    x = np.sort(np.random.default_rng(0).standard_normal(1_000).astype(np.float32))
    x[0], x[-1] = -np.inf, np.inf
    keys, back = np.empty(x.size, np.int32), np.empty_like(x)
    each_ordered(x, keys, back)
    assert (np.diff(keys) > 0).all()
    np.testing.assert_array_equal(back, x)


def attention_by_hand(
    query: Array, key: Array, value: Array, start: int, scale: float, window: int, softcap: float, sinks: Array
) -> Array:
    """[tokens, heads, group, width] over [heads, keys, width], in float64."""
    scores = np.einsum("thgd,hkd->thgk", query, key) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    positions, keys = start + np.arange(len(query))[:, None], np.arange(key.shape[1])[None]
    seen = keys <= positions
    if window:
        seen &= keys > positions - window
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    if sinks.size:
        total += np.exp(sinks.reshape(key.shape[0], -1, 1) - scores.max(-1, keepdims=True))
    weights /= total
    out: Array = np.einsum("thgk,hkd->thgd", weights, value)
    return out


def with_memory_behind(x: Array) -> Array:
    """The same array, with the eight words behind it that may be read."""
    flat = np.zeros(x.size + 8 * x.shape[-1], x.dtype)
    flat[: x.size] = x.ravel()
    return flat[: x.size].reshape(x.shape)


def in_page(memory: Array, width: int, page_size: int) -> tuple[Array, Array]:
    """The keys [pages, heads, words, page size, pack] and values [pages, heads, words, width, pack] of pages."""
    pages, heads, _, pack = memory.shape
    begin = key_words(width, page_size, pack)
    keys = memory[:, :, :begin].reshape(pages, heads, width // pack, page_size, pack)
    return keys, memory[:, :, begin:].reshape(pages, heads, -1, padded_width(width), pack)


def check_attention(
    sequences: list[tuple[int, int]],
    *,
    page_size: int,
    heads: int = 2,
    group: int = 3,
    width: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    with_sinks: bool = False,
    bfloat16: bool = False,
    widened: bool = False,
    workers: int = 3,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    starts, counts = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    blocks = -(-(starts + counts) // page_size)
    order = rng.permutation(int(blocks.sum()) + 2).astype(np.int32)
    tables = np.full((len(starts) + 2, int(blocks.max())), 10**6, np.int32)
    slots = rng.permutation(len(tables))[: len(starts)].astype(np.int32)
    pack = 2 if bfloat16 else 1
    memory = np.full(page_shape(len(order), heads, width, page_size, pack), np.nan, np.float32)
    truth: list[tuple[Array, Array]] = []
    taken = 0
    for i, (start, count) in enumerate(sequences):
        tables[slots[i], : blocks[i]] = order[taken : taken + blocks[i]]
        taken += int(blocks[i])
        key = rng.standard_normal((heads, start + count, width)).astype(np.float32)
        value = rng.standard_normal((heads, start + count, width)).astype(np.float32)
        if bfloat16:
            key, value = (to_float64(to_bfloat16(x)).astype(np.float32) for x in (key, value))
        truth.append((key, value))
        for t in range(start + count):
            page = tables[slots[i], t // page_size]
            place = t % page_size
            keys, values = in_page(memory, width, page_size)
            keys[page, :, :, place] = key[:, t].reshape(heads, -1, pack)
            values[page, :, place // pack, :width, place % pack] = value[:, t]
    query = rng.standard_normal((int(counts.sum()), heads * group * width + 5)).astype(np.float32)
    out = np.full((len(query), heads * group * width), np.nan, np.float32)
    if bfloat16:
        query, memory, out = (to_bfloat16(x) for x in (query, memory, out))
    rows = (np.cumsum(counts) - counts).astype(np.int64)
    cut = cut_blocks(tables, slots, starts, counts, page_size, group, window, workers, heads, GROUPS)
    scale = width**-0.5
    sinks = rng.standard_normal(heads * group if with_sinks else 0).astype(np.float32)
    pages = Pages(with_memory_behind(memory), width, page_size)
    products = np.dtype(np.uint32) if widened else None
    attend(query, out, pages, tables, slots, cut, group, scale, window, softcap, sinks, rows=products)
    got = to_float64(out).reshape(len(query), heads, group, width)
    asked = to_float64(query)[:, : heads * group * width].reshape(got.shape)
    for i, (start, count) in enumerate(sequences):
        chunk = slice(rows[i], rows[i] + count)
        expected = attention_by_hand(asked[chunk], *truth[i], start, scale, window, softcap, sinks)
        tolerance = 2e-2 if bfloat16 else 1e-5
        np.testing.assert_allclose(got[chunk], expected, rtol=tolerance, atol=tolerance)


MIXED = [(0, 1), (5, 1), (63, 1), (64, 1), (200, 1), (0, 70), (0, 129), (33, 40), (100, 3), (7, 17)]


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 24, 64])
def test_attention_reads_pages_of_any_size(page_size: int, bfloat16: bool) -> None:
    check_attention(MIXED, page_size=page_size, bfloat16=bfloat16)


@pytest.mark.parametrize("width", [32, 64, 96])
@pytest.mark.parametrize("page_size", [1, 4, 8, 24])
def test_attention_takes_heads_of_whole_registers_of_a_matrix_unit(page_size: int, width: int) -> None:
    check_attention(MIXED, page_size=page_size, width=width, bfloat16=True, widened=True)


@pytest.mark.parametrize(("window", "softcap"), [(12, 0.0), (64, 0.7), (500, 0.0), (0, 0.7)])
def test_rows_of_such_heads_see_what_they_may(window: int, softcap: float) -> None:
    check_attention(MIXED, page_size=8, width=64, window=window, softcap=softcap, with_sinks=True, bfloat16=True)


@pytest.mark.parametrize("page_size", [1, 8, 24])
@pytest.mark.parametrize("window", [0, 12])
def test_attention_may_widen_bfloat16(window: int, page_size: int) -> None:
    check_attention(MIXED, page_size=page_size, window=window, with_sinks=True, bfloat16=True, widened=True)


@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize("window", [1, 12, 64, 500])
def test_attention_sees_no_more_than_its_window(window: int, page_size: int) -> None:
    check_attention(MIXED, page_size=page_size, window=window)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_attention_knows_sinks(bfloat16: bool) -> None:
    check_attention(MIXED, page_size=8, with_sinks=True, bfloat16=bfloat16)


def test_attention_caps_its_scores() -> None:
    check_attention(MIXED, page_size=16, softcap=0.7)


@pytest.mark.parametrize(("heads", "group", "width"), [(1, 1, 64), (3, 3, 64), (2, 8, 128), (5, 1, 80), (1, 7, 24)])
def test_attention_takes_any_number_and_size_of_heads(heads: int, group: int, width: int) -> None:
    check_attention(MIXED, page_size=16, heads=heads, group=group, width=width)


@examples(25)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16, 64]),
    window=st.sampled_from([0, 0, 1, 17, 70]),
    workers=st.integers(1, 5),
    bfloat16=st.booleans(),
    group=st.sampled_from([1, 3, 8, 17]),
)
def test_attention_of_any_step(
    sequences: list[tuple[int, int]], page_size: int, window: int, workers: int, bfloat16: bool, group: int
) -> None:
    check_attention(
        sequences, page_size=page_size, window=window, workers=workers, bfloat16=bfloat16, group=group, width=64
    )


@examples(50)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700)), min_size=1, max_size=20),
    group=st.sampled_from([1, 3, 8, BLOCK_ROWS, BLOCK_ROWS + 1]),
    window=st.sampled_from([0, 100]),
    workers=st.integers(1, 9),
    heads=st.integers(1, 4),
)
def test_blocks_cover_every_token_once_and_every_pair_has_one_worker(
    sequences: list[tuple[int, int]], group: int, window: int, workers: int, heads: int
) -> None:
    starts, counts = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    blocks = cut(starts, counts, group, window, workers, heads)
    covered = sorted((row, row + tokens) for row, tokens in blocks.runs[:, [ROW, TOKENS]].tolist() if row >= 0)
    assert [begin for begin, _ in covered] == [0, *(end for _, end in covered[:-1])]
    assert covered[-1][1] == counts.sum()
    assert blocks.bounds[0] == 0
    assert blocks.bounds[-1] == (len(blocks.firsts) - 1) * heads
    assert (np.diff(blocks.bounds) >= 0).all()


def cut(starts: Array, counts: Array, group: int, window: int, workers: int, heads: int) -> Blocks:
    """Cut sequences that share nothing."""
    width = int(-(-(starts + counts).max() // 8))
    tables = np.arange(len(starts) * width, dtype=np.int32).reshape(len(starts), width)
    slots = np.arange(len(starts), dtype=np.int32)
    return cut_blocks(tables, slots, starts, counts, 8, group, window, workers, heads, GROUPS)


def test_blocks_are_dealt_evenly() -> None:
    starts, counts = np.full(64, 300, np.int32), np.ones(64, np.int32)
    assert cut(starts, counts, 3, 0, 4, 3).bounds.tolist() == [0, 48, 96, 144, 192]


@pytest.mark.parametrize(("tokens", "blocks"), [(3, 1), (16, 2), (42, 2), (64, 2), (128, 4)])
def test_a_chunk_is_cut_evenly_and_so_that_workers_have_equal_shares(tokens: int, blocks: int) -> None:
    found = cut(np.array([4000], np.int32), np.array([tokens], np.int32), 3, 0, 2, 3)
    assert len(found.firsts) - 1 == blocks
    assert np.ptp(found.runs[:, TOKENS]) <= 1
    if blocks > 1:  # fewer rows than a tile are not cut
        assert found.bounds.tolist() == [0, 3 * blocks // 2, 3 * blocks]


def shared_step(
    rng: np.random.Generator, page_size: int, prefixes: list[tuple[int, int]]
) -> tuple[Array, Array, Array, Array]:
    """Make tables, slots, starts and counts of decodes, so many behind each prefix of so many tokens; and a chunk."""
    behind = [(g, tokens) for g, (rows, tokens) in enumerate(prefixes) for _ in range(rows)]
    starts = np.array([tokens + rng.integers(0, 100) for _, tokens in behind] + [37], np.int32)
    counts = np.array([1] * len(behind) + [20], np.int32)
    blocks = -(-(starts + counts) // page_size)
    tables = np.full((len(starts), blocks.max()), -1, np.int32)
    pages = iter(rng.permutation(int(blocks.sum()) + 1).tolist())
    first: dict[int, int] = {}
    for i, used in enumerate(blocks.tolist()):
        tables[i, :used] = [next(pages) for _ in range(used)]
        if i < len(behind):
            g, tokens = behind[i]
            whole = tokens // page_size
            tables[i, :whole] = tables[first.setdefault(g, i), :whole]
    order = rng.permutation(len(behind))
    tables[: len(order)], starts[: len(order)] = tables[order], starts[order]
    slots = rng.permutation(len(starts)).astype(np.int32)
    placed = np.empty_like(tables)
    placed[slots] = tables
    return placed, slots, starts, counts


@pytest.mark.parametrize("rows", [np.float32, np.uint16, np.uint32])
@pytest.mark.parametrize("page_size", [4, 8, 24])
@pytest.mark.parametrize("prefixes", [[(9, 300)], [(5, 130), (1, 50), (70, 640)], [(4, 128), (3, 500)]])
def test_decodes_that_share_a_prefix_get_what_each_gets_alone(
    prefixes: list[tuple[int, int]], page_size: int, rows: type
) -> None:
    """To the last bit: answers depend on nothing that happens to run beside them."""
    heads, group, width, rng = 2, 3, 64, np.random.default_rng(0)
    bfloat16, none = rows is not np.float32, np.empty(0, np.float32)
    tables, slots, starts, counts = shared_step(rng, page_size, prefixes)
    shape = page_shape(int(tables.max()) + 1, heads, width, page_size, 2 if bfloat16 else 1)
    memory = rng.standard_normal(shape).astype(np.float32)
    query = rng.standard_normal((int(counts.sum()), heads * group * width)).astype(np.float32)
    if bfloat16:
        memory, query = to_bfloat16(memory), to_bfloat16(query)
    pages = Pages(with_memory_behind(memory), width, page_size)
    outs = []
    for groups in (GROUPS, Groups(rows=1000)):
        cut = cut_blocks(tables, slots, starts, counts, page_size, group, 0, 3, heads, groups)
        assert (cut.runs[:, ROW] < 0).any() == (groups is GROUPS)
        outs.append(np.empty_like(query))
        attend(query, outs[-1], pages, tables, slots, cut, group, width**-0.5, 0, 0.0, none, rows=np.dtype(rows))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_a_prefix_is_shared_where_enough_decodes_have_it_and_layers_see_all_of_it() -> None:
    tables = np.tile(np.arange(40, dtype=np.int32), (8, 1))
    slots, starts = np.arange(8, dtype=np.int32), np.full(8, 300, np.int32)
    tables[:, 36] = 100 + slots
    tables[7] += 200
    counts = np.ones(8, np.int32)

    def shared(rows: int, window: int) -> set[int]:
        of = slice(8 - rows, 8)
        cut = cut_blocks(tables, slots[of], starts[of], counts[of], 8, 3, window, 1, 1, GROUPS)
        return {int(end) for end in cut.runs[cut.runs[:, ROW] < 0][:, HIGH]}

    assert shared(8, 0) == {256}  # 36 pages of 8 are alike: four tiles of 64
    assert shared(GROUPS.rows, 0) == set()  # the last of them has pages of its own
    assert shared(8, 1000) == set()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_normalize_is_rmsnorm(bfloat16: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((7, 33)).astype(np.float32), rng.standard_normal(33).astype(np.float32)
    stored = to_bfloat16(x) if bfloat16 else x
    out = np.zeros_like(stored)
    normalize(stored, weight, 1e-5, out)
    expected = functional.rms_norm(torch.from_numpy(to_float64(stored)), (33,), torch.from_numpy(weight).double(), 1e-5)
    np.testing.assert_allclose(to_float64(out), expected, rtol=1e-2 if bfloat16 else 1e-5)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gate_is_the_activated_left_half_times_the_right(activation: int, bfloat16: bool) -> None:
    x = (3 * np.random.default_rng(0).standard_normal((5, 2 * 40))).astype(np.float32)
    x[0, :2] = [-200, 200]
    stored = to_bfloat16(x) if bfloat16 else x
    out = np.zeros((5, 40), stored.dtype)
    gate(stored, activation, out)
    left, right = torch.from_numpy(to_float64(stored)).chunk(2, -1)
    active = functional.silu(left) if activation == SILU else functional.gelu(left, approximate="tanh")
    tolerance = 1e-2 if bfloat16 else 1e-5
    np.testing.assert_allclose(to_float64(out), active * right, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(("width", "rotary"), [(16, 0), (16, 8), (16, 16), (80, 64), (80, 80)])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_finished_in_place_and_keys_and_values_reach_their_pages(
    width: int, rotary: int, normed: bool, bfloat16: bool
) -> None:
    rng = np.random.default_rng(0)
    tokens, query_heads, heads, page_size = 9, 4, 2, 4
    packed = rng.standard_normal((tokens, (query_heads + 2 * heads) * width)).astype(np.float32)
    angles = rng.standard_normal((tokens, rotary // 2))
    cosine, sine = (np.tile(f(angles), 2).astype(np.float32) for f in (np.cos, np.sin))
    query_norm, key_norm = rng.standard_normal((2, width if normed else 0)).astype(np.float32)
    if bfloat16:
        packed, cosine, sine = (to_bfloat16(x) for x in (packed, cosine, sine))
    before = to_float64(packed).reshape(tokens, -1, width)
    place = rng.permutation(5 * page_size)[:tokens].astype(np.int32)
    pack = 2 if bfloat16 else 1
    memory = np.zeros(page_shape(5, heads, width, page_size, pack), packed.dtype)
    page, offset = place // page_size, place % page_size
    rotate_and_store(
        packed, query_heads, cosine, sine, query_norm, key_norm, 1e-6, page, offset, Pages(memory, width, page_size)
    )
    keys, values = in_page(memory, width, page_size)

    def finished(x: Array, norm: Array) -> Array:
        if normed:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm
        left, right = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        turned = np.concatenate((-right, left), -1)
        c, s = (to_float64(f)[:, None] for f in (cosine, sine))
        return np.concatenate((x[..., :rotary] * c + turned * s, x[..., rotary:]), -1)

    after = to_float64(packed).reshape(tokens, -1, width)
    tolerance = 2e-2 if bfloat16 else 1e-5
    np.testing.assert_allclose(
        after[:, :query_heads], finished(before[:, :query_heads], query_norm), rtol=tolerance, atol=tolerance
    )
    stored = to_float64(keys)[page, :, :, offset].reshape(tokens, heads, width)
    expected = finished(before[:, query_heads : query_heads + heads], key_norm)
    np.testing.assert_allclose(stored, expected, rtol=tolerance, atol=tolerance)
    stored = to_float64(values)[page, :, offset // pack, :, offset % pack]
    np.testing.assert_array_equal(stored, before[:, query_heads + heads :])
