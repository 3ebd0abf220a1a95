"""Kernels in Triton equal a float64 computation: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from llmbatch.kernels import reference
from llmbatch.kernels.cascade import GROUPS, Groups
from llmbatch.kernels.interface import AttentionPlan, BatchLayout, PagedAttention
from llmbatch.kernels.spec import GELU_TANH, SILU, AttentionSpec
from llmbatch.kernels.triton import fused as triton_fused
from llmbatch.kernels.triton.argmax import best
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.kernels.triton.fp8 import ELEMENT, quantise_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
# The interpreter cuts float32 off to bfloat16 where a device rounds, twice as far; norms forgive it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Cases that differ from another one in numbers only are left to `make test-all`.
slow = partial(pytest.param, marks=pytest.mark.slow)
DTYPES = [torch.float32, slow(torch.float16), torch.bfloat16]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a whole result; NaN where anything is."""
    return float((got.double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Case:
    """A step, and what attends it. Decodes come first; those of `shared` tokens have as many in common."""

    decodes: tuple[int, ...] = (0, 15, 16, 130, 700)  # tokens in pages
    prefills: tuple[tuple[int, int], ...] = ((0, 1), (0, 70), (129, 40), (33, 90))  # tokens in pages, and computed
    heads: int = 2
    group: int = 4
    width: int = 64
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    e4m3: bool = False  # pages
    shared: int = 0
    groups: Groups = GROUPS
    fixed: bool = False  # launches as for any step of as many decodes
    padded: int | None = None  # launches as for any step of so many tokens more


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not written to is NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*given: Any, **named: Any) -> torch.Tensor:
            tensor = make(*given, **named)
            return tensor.fill_(NAN) if tensor.is_floating_point() else tensor

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", poison(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
        yield


def planned(case: Case, layout: BatchLayout, spec: AttentionSpec) -> tuple[PagedAttention, AttentionPlan]:
    """What attends the case, and its plan."""
    if case.padded is not None:
        padded = TritonAttention(DEVICE, case.groups).padded
        return padded, padded.plan_padded(layout, spec, case.size, int(layout.counts.sum()) + case.padded)
    backend = TritonAttention(DEVICE, case.groups)
    return backend, (backend.plan_fixed if case.fixed else backend.plan)(layout, spec, case.size)


def check(case: Case, seed: int = 0) -> None:
    """Attention of a step on poisoned memory, against the reference."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    starts = [case.shared + start for start in case.decodes] + [start for start, _ in case.prefills]
    counts = [1] * len(case.decodes) + [count for _, count in case.prefills]
    blocks = [-(-(start + count) // case.size) for start, count in zip(starts, counts, strict=True)]
    free = iter(rng.permutation(sum(blocks)).astype(np.int32).tolist())
    slots = rng.permutation(len(starts) + 2)[: len(starts)].astype(np.int32)
    tables = np.full((len(starts) + 2, max(blocks)), 10**6, np.int32)
    common = [next(free) for _ in range(case.shared // case.size)] if case.decodes else []
    shape = (sum(blocks), case.heads, case.size, case.width)
    keys, values = (torch.full(shape, NAN, dtype=case.dtype, device=DEVICE) for _ in range(2))
    for i, (slot, need) in enumerate(zip(slots, blocks, strict=True)):
        begun = common if i < len(case.decodes) else []
        tables[slot, :need] = [*begun, *(next(free) for _ in range(need - len(begun)))]
        for x in (keys, values):
            pages = torch.from_numpy(tables[slot, :need]).long().to(DEVICE)
            rows = x[pages].transpose(1, 2).flatten(0, 1)  # [tokens, heads, width]
            fresh = torch.randn(rows.shape, device=DEVICE).to(case.dtype)
            rows[: starts[i] + counts[i]] = torch.where(rows.isnan(), fresh, rows)[: starts[i] + counts[i]]
            x[pages] = rows.view(need, case.size, case.heads, case.width).transpose(1, 2)
    if case.e4m3:
        keys, values = keys.to(ELEMENT), values.to(ELEMENT)
    query_heads = case.heads * case.group
    query = torch.randn(sum(counts) + (case.padded or 0), query_heads * case.width, device=DEVICE).to(case.dtype)
    spec = AttentionSpec(
        layer=0,
        query_heads=query_heads,
        heads=case.heads,
        width=case.width,
        scale=case.width**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=torch.randn(query_heads, device=DEVICE) if case.sinks else None,
    )
    columns = (np.array(starts, np.int32), np.array(counts, np.int32))
    layout = BatchLayout(tables, slots, *columns, len(case.decodes))
    backend, plan = planned(case, layout, spec)
    tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in plan.uploaded]
    with poisoned_memory():
        got = backend.attend(spec, query, keys, values, plan, tensors)
        if case.padded is not None:
            assert (got[sum(counts) :] == 0).all()
    query, got = query[: sum(counts)], got[: sum(counts)]
    expected = reference.attend(
        query.view(-1, query_heads, case.width),
        keys,
        values,
        torch.from_numpy(tables[slots]).to(DEVICE),
        starts,
        counts,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=spec.sinks,
    )
    products = torch.float16 if case.e4m3 else case.dtype
    assert relative_error(got.view(expected.shape), expected) < max(TOLERANCE[case.dtype], TOLERANCE[products])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_of_decodes_and_prefills(dtype: torch.dtype) -> None:
    check(Case(dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "group", "width"), [(1, 1, 64), (1, 7, 128), (3, 3, 80), slow(1, 2, 96), (1, 8, 256)]
)
def test_attention_takes_any_number_and_size_of_heads(heads: int, group: int, width: int) -> None:
    check(Case(heads=heads, group=group, width=width, decodes=(15, 300), prefills=((20, 40),)))


@pytest.mark.parametrize("size", [1, slow(8), slow(64), 256])
def test_attention_reads_pages_of_any_size(size: int) -> None:
    check(Case(heads=1, size=size))


@pytest.mark.parametrize("window", [1, slow(31), 128, slow(5000)])
def test_attention_sees_no_more_than_its_window(window: int) -> None:
    check(Case(heads=1, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_caps_its_scores_and_knows_sinks(dtype: torch.dtype) -> None:
    check(Case(heads=1, softcap=5.0, sinks=True, dtype=dtype))


@pytest.mark.parametrize("shared", [0, 512])
def test_attention_is_the_same_where_launches_are_fixed(shared: int) -> None:
    check(Case(heads=1, decodes=tuple(range(0, 340, 10)), prefills=(), shared=shared, fixed=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_short_chunk_behind_many_keys_is_cut(sinks: bool) -> None:
    check(Case(decodes=(600,), prefills=((1500, 40), (3, 5)), heads=1, sinks=sinks))


def test_a_decode_is_cut_where_there_are_few() -> None:
    check(Case(decodes=(9000,), prefills=(), heads=1, sinks=True))


@pytest.mark.parametrize(("dtype", "sinks"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_shared_prefix_is_attended_once(dtype: torch.dtype, sinks: bool) -> None:
    case = Case(decodes=tuple(range(0, 72, 2)), prefills=(), heads=1, shared=512, dtype=dtype, sinks=sinks)
    check(case)
    check(replace(case, groups=Groups(0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_pages_of_8_bits(dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, e4m3=True))


@pytest.mark.parametrize(
    "case",
    [
        Case(width=80, window=100, softcap=5.0, sinks=True),
        Case(heads=1, width=256, size=1),
        Case(heads=1, decodes=tuple(range(0, 72, 2)), prefills=(), shared=512),
        slow(Case(heads=1, decodes=tuple(range(0, 340, 10)), prefills=(), shared=512, fixed=True)),
        slow(Case(decodes=(600,), prefills=((1500, 40), (3, 5)), heads=1)),
        slow(Case(decodes=(9000,), prefills=(), heads=1)),
    ],
    ids=["features", "wide", "shared", "fixed", "short chunk", "long decode"],
)
def test_pages_of_8_bits_are_attended_in_every_way(case: Case) -> None:
    check(replace(case, dtype=torch.bfloat16, e4m3=True))


@pytest.mark.parametrize("seed", [0, 1, slow(2), slow(3)])
def test_attention_of_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes = tuple(rng.integers(0, 600, rng.integers(0, 8)).tolist())
    prefills = tuple((int(rng.integers(0, 200)), int(rng.integers(1, 150))) for _ in range(3))
    check(Case(decodes=decodes, prefills=prefills, heads=1, window=int(rng.choice([0, 100]))), seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_launches_attend_a_step_and_give_nothing_to_tokens_that_are_not_there(dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, padded=77))


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=1, group=1, softcap=5.0, sinks=True),
        Case(heads=1, window=31, sinks=True),
        slow(Case(heads=3, group=3, width=80, decodes=(15, 300), prefills=((20, 40),))),
        Case(heads=1, group=8, width=256, decodes=(15, 300), prefills=((20, 40),), dtype=torch.bfloat16),
        Case(decodes=(600,), prefills=((1500, 40), (3, 5)), heads=1, sinks=True),
        slow(Case(decodes=(9000,), prefills=(), heads=1, sinks=True)),
        Case(decodes=(), heads=1),
        Case(decodes=tuple(range(0, 72, 2)), prefills=((700, 20),), heads=1, shared=512, sinks=True),
    ],
)
def test_padded_launches_attend_what_others_do(case: Case) -> None:
    check(replace(case, padded=5))


@pytest.mark.parametrize("seed", [0, 1, slow(2), slow(3)])
def test_padded_launches_attend_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decodes = tuple(rng.integers(0, 600, rng.integers(0, 8)).tolist())
    prefills = tuple((int(rng.integers(0, 200)), int(rng.integers(1, 150))) for _ in range(3))
    check(Case(decodes=decodes, prefills=prefills, heads=1, padded=int(rng.integers(0, 150))), seed)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [64, 200, 4096])
def test_the_norm_of_a_row(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight, out = random(5, width, dtype=dtype), random(width), poisoned(5, width, dtype=dtype)
    triton_fused.normalize(x, weight, 1e-5, out)
    exact = x.double()
    expected = exact / torch.sqrt((exact**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_the_gate(activation: int, dtype: torch.dtype) -> None:
    torch.manual_seed(activation)
    x, out = random(7, 2 * 300, dtype=dtype), poisoned(7, 300, dtype=dtype)
    triton_fused.gate(x, activation, out)
    left, right = x[:, :300].double(), x[:, 300:].double()
    active = functional.silu(left) if activation == SILU else functional.gelu(left, approximate="tanh")
    assert relative_error(out, active * right) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "rotary", "query_norm", "key_norm"),
    [
        (64, 64, False, False),
        (64, 64, True, True),
        (80, 40, False, True),
        (32, 0, False, False),
        (128, 128, True, False),
    ],
)
def test_queries_are_finished_and_keys_and_values_stored(
    width: int, rotary: int, query_norm: bool, key_norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(width)
    query_heads, heads, tokens, size, pages = 6, 2, 7, 8, 4
    packed = random(tokens, (query_heads + 2 * heads) * width, dtype=dtype)
    query = poisoned(tokens, query_heads * width, dtype=dtype)
    keys, values = (poisoned(pages, heads, size, width, dtype=dtype) for _ in range(2))
    places = torch.randperm(pages * size)[:tokens].int().to(DEVICE)
    cosine, sine = (random(tokens, rotary, dtype=dtype) if rotary else None for _ in range(2))
    scales = [random(width) if given else None for given in (query_norm, key_norm)]
    triton_fused.rotate_and_store(packed, query, cosine, sine, scales[0], scales[1], 1e-6, places, keys, values)

    def finished(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None:
            x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * scale.double()
        if cosine is None or sine is None:
            return x
        left, right, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
        turned = x[..., :rotary] * cosine.double()[:, None] + torch.cat((-right, left), -1) * sine.double()[:, None]
        return torch.cat((turned, rest), -1)

    heads_of = packed.double().view(tokens, -1, width)
    page, place = places.long() // size, places.long() % size
    stored: list[Any] = [keys[page, :, place], values[page, :, place]]
    assert (
        relative_error(query.view(tokens, -1, width), finished(heads_of[:, :query_heads], scales[0])) < TOLERANCE[dtype]
    )
    expected = finished(heads_of[:, query_heads : query_heads + heads], scales[1])
    assert relative_error(stored[0], expected) < TOLERANCE[dtype]
    assert torch.equal(stored[1].double(), heads_of[:, query_heads + heads :])
    assert int(keys.isnan().sum()) == (pages * size - tokens) * heads * width  # and nothing else was


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_keys_and_values_are_rounded_to_8_bits(norms: bool, dtype: torch.dtype) -> None:
    """As torch rounds float32, once keys are turned; to the largest number where they are beyond it."""
    torch.manual_seed(0)
    heads, tokens, width, size = 2, 24, 64, 8
    sizes = torch.logspace(-4, 3, tokens, device=DEVICE)[:, None]
    packed = (random(tokens, 4 * heads * width) * sizes).to(dtype)
    cosine, sine = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype)
    weight = random(width) if norms else None
    places = torch.randperm(tokens).int().to(DEVICE)

    def stored(computed: torch.dtype, kept: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given, cos, sin = (x.to(computed) for x in (packed, cosine, sine))
        query = poisoned(tokens, 2 * heads * width, dtype=computed)
        keys, values = (torch.zeros(tokens // size, heads, size, width, dtype=kept, device=DEVICE) for _ in range(2))
        triton_fused.rotate_and_store(given, query, cos, sin, weight, weight, 1e-6, places, keys, values)
        return query, keys.float(), values.float()

    query, *rounded = stored(dtype, ELEMENT)
    assert torch.equal(query, stored(dtype, dtype)[0])
    for got, exact in zip(rounded, stored(torch.float32, torch.float32)[1:], strict=True):
        expected = exact.clamp(-448, 448).to(ELEMENT).float()
        assert (got != expected).float().mean() < 0.001  # ties, where a device adds otherwise
        torch.testing.assert_close(got, expected, rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("odd", [NAN, float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_in_8_bits(odd: float) -> None:
    packed = torch.ones(1, 3 * 16, dtype=torch.bfloat16, device=DEVICE)
    packed[0, [17, 35]] = odd
    query = torch.empty(1, 16, dtype=torch.bfloat16, device=DEVICE)
    keys, values = (torch.zeros(1, 1, 1, 16, device=DEVICE).to(ELEMENT) for _ in range(2))
    place = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    triton_fused.rotate_and_store(packed, query, None, None, None, None, 0.0, place, keys, values)
    for kept, at in ((keys, 1), (values, 3)):
        assert kept.float().flatten().isnan().nonzero().tolist() == [[at]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_token_is_the_first_of_the_highest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = random(6, 9001, dtype=dtype)
    logits[0, [77, 4200, 8999]] = 50.0
    logits[1, 5] = NAN
    logits[2, 5] = float("inf")
    logits[3] = -float("inf")
    logits[4, :9000] = -float("inf")
    tokens, finite = best(logits)
    assert finite.tolist() == [True, False, False, False, True, True]
    assert tokens[[0, 4]].tolist() == [77, 9000]
    assert logits[5, tokens[5]] == logits[5].max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 80, 300])
def test_rows_are_rounded_to_the_nearest_numbers_of_8_bits(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, width) * torch.logspace(-3, 2, 7)[:, None]).to(dtype)
    x[3] = 0.0
    numbers, scales = quantise_rows(x.to(DEVICE))
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12)
    expected = (x.float() * (448.0 / largest)).to(torch.float8_e4m3fn)
    torch.testing.assert_close(scales.cpu(), largest / 448.0, rtol=1e-6, atol=0)
    assert (numbers.cpu().float() != expected.float()).float().mean() < 0.01  # ties, where a device divides otherwise
    torch.testing.assert_close(numbers.cpu().float(), expected.float(), rtol=2**-3, atol=2**-9)
