"""Rows cut into shards for several engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.io.row_hash import hash_rows
from llmbatch.operators.ray.sharding import DEPTHS, OUTLINE, Shards, cut, occurrences, outline
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.workload import Pool, Scheduling
from llmbatch.preprocess.request_batch import RequestBatch, RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams

COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
POOL = Pool(1_000, 16)
GREEDY, DRAWN = SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=1.0)


def outlined(
    prompts: Sequence[Sequence[int] | None], *, params: SamplingParams = GREEDY, max_tokens: Sequence[int] | None = None
) -> pa.Table:
    """The outlines of rows with these prompts; None has no request."""
    good = [i for i, prompt in enumerate(prompts) if prompt is not None]
    kept = [np.array(prompts[i], np.int32) for i in good]
    request_of = np.full(len(prompts), -1, np.int32)
    request_of[good] = np.arange(len(good))
    asked = [params.max_tokens] * len(prompts) if max_tokens is None else max_tokens
    zeros = np.zeros(len(good), np.int32)
    requests = RequestBatch(
        np.concatenate([*kept, np.empty(0, np.int32)]),
        np.concatenate(([0], np.cumsum([len(prompt) for prompt in kept]))).astype(np.int64),
        np.array([asked[i] for i in good], np.int32),
        zeros,
        (params,),
        np.arange(len(good), dtype=np.uint64),
        zeros,
    )
    lengths = np.array([len(prompt or []) for prompt in prompts], np.int32)
    return outline(RowRequests(requests, request_of, lengths, {}), hashes(prompts))


def hashes(prompts: Sequence[Sequence[int] | None]) -> NDArray[np.uint64]:
    return hash_rows(pa.table({"prompt": pa.array(prompts, pa.list_(pa.int32()))}))


def sharded(
    outlines: pa.Table, *, actors: int = 2, rows_per_shard: int = 20_000, scheduling: Scheduling | None = None
) -> Shards:
    scheduling = scheduling or Scheduling(max_running=512)
    return cut(outlines, COST, POOL, scheduling, actors=actors, rows_per_shard=rows_per_shard)


def random_prompts(seed: int, rows: int, *, groups: int, shared: int, own: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 100, (groups, shared)).tolist()
    return [prefixes[rng.integers(groups)] + rng.integers(0, 100, own).tolist() for _ in range(rows)]


def test_an_outline_tells_lengths_limits_and_prefixes() -> None:
    table = outlined([list(range(40)), None, list(range(40))])
    assert table.schema == OUTLINE
    assert table["tokens"].to_pylist() == [40, 0, 40]
    assert table["max_tokens"].to_pylist() == [16, 1, 16]
    assert table["repeatable"].to_pylist() == [True, True, True]
    assert [len(row) for row in table["prefixes"].to_pylist()] == [3, 0, 3]  # of 16, 23 and 32 tokens
    assert table["row"].to_numpy().tolist() == hashes([list(range(40)), None, list(range(40))]).tolist()


@given(st.integers(0, 100), st.integers(1, 300))
@settings(max_examples=50)
def test_prefixes_have_equal_hashes_as_deep_as_tokens_are_equal(seed: int, common: int) -> None:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 50, common).tolist()
    one, other = outlined([[*shared, 60, *range(300)], [*shared, 61, *range(300)]])["prefixes"].to_pylist()
    equal = [a == b for a, b in zip(one, other, strict=True)]
    assert equal == [depth <= common for depth in DEPTHS[: len(one)]]


def test_answers_of_known_length_are_told() -> None:
    always = SamplingParams(max_tokens=16, ignore_eos=True)
    assert outlined([[1], [2]], params=always)["known"].to_pylist() == [16, 16]
    assert outlined([[1], [2]])["known"].to_pylist() == [0, 0]


@given(st.integers(0, 1000), st.integers(0, 60), st.integers(1, 5), st.integers(1, 30))
@settings(max_examples=60)
def test_every_row_has_a_shard(seed: int, rows: int, actors: int, rows_per_shard: int) -> None:
    prompts: list[list[int] | None] = list(random_prompts(seed, rows, groups=3, shared=20, own=2))
    prompts[::7] = [None] * len(prompts[::7])
    shards = sharded(outlined(prompts), actors=actors, rows_per_shard=rows_per_shard)
    assert shards.count >= 2
    found = shards.of(hashes([*prompts, [1, 2, 3]]))
    assert found.dtype == np.int32
    assert found.size == 0 or (found.min() >= 0 and found.max() < shards.count)


def test_rows_that_share_a_long_prefix_are_in_one_shard() -> None:
    prompts = random_prompts(1, 8000, groups=400, shared=600, own=20)
    shards = sharded(outlined(prompts))
    assert shards.count == 15
    found = shards.of(hashes(prompts))
    homes: dict[int, set[int]] = {}
    for prompt, shard in zip(prompts, found.tolist(), strict=True):
        homes.setdefault(hash(tuple(prompt[:600])), set()).add(shard)
    split = sum(len(shards_of) > 1 for shards_of in homes.values())
    assert split <= 2 * shards.count * 0.2  # of the two cuts a shard, few fall where no small subtree is


def test_a_prefix_that_all_share_does_not_hide_those_below_it() -> None:
    prompts = [[7] * 1000 + row for row in random_prompts(1, 4000, groups=100, shared=600, own=20)]
    found = sharded(outlined(prompts)).of(hashes(prompts))
    homes: dict[int, set[int]] = {}
    for prompt, shard in zip(prompts, found.tolist(), strict=True):
        homes.setdefault(hash(tuple(prompt[:1600])), set()).add(shard)
    assert np.mean([len(shards_of) for shards_of in homes.values()]) < 1.2


def test_shards_take_the_same_predicted_seconds_not_the_same_rows() -> None:
    rng = np.random.default_rng(1)
    long = rng.random(6000) < 0.2
    prompts = [rng.integers(0, 99, 2000 if heavy else 100).tolist() for heavy in long]
    always = SamplingParams(max_tokens=16, ignore_eos=True)
    shards = sharded(outlined(prompts, params=always))
    found = shards.of(hashes(prompts))
    lengths = np.array([len(prompt) for prompt in prompts])
    compute = COST.request_compute(lengths, np.full(6000, 16.0))
    memory = COST.request_memory(lengths, np.full(6000, 16.0), np.full(6000, 256.0))
    seconds = np.bincount(found, weights=COST.overlap(compute, memory), minlength=shards.count)
    assert seconds.max() <= 1.1 * seconds.mean()
    assert seconds.min() >= 0.9 * seconds.mean()


def test_rows_with_one_answer_are_in_one_shard() -> None:
    prompts = [[i % 10] * 30 for i in range(3000)]
    shards = sharded(outlined(prompts), actors=3)
    found = shards.of(hashes(prompts))
    assert not shards.spread
    assert all(len(set(found[i::10].tolist())) == 1 for i in range(10))


def test_rows_that_are_drawn_anew_are_spread_over_shards() -> None:
    prompts = [[5] * 30] * 4000
    shards = sharded(outlined(prompts, params=DRAWN), actors=2)
    assert shards.spread
    contents = hash_rows(pa.table({"id": range(4000)}))
    whole = shards.of(hashes(prompts), contents)
    assert np.bincount(whole, minlength=shards.count).min() > 0.8 * 4000 / shards.count
    parts = [shards.of(hashes(prompts[i : i + 100]), contents[i : i + 100]) for i in range(0, 4000, 100)]
    counts = np.bincount(np.concatenate(parts), minlength=shards.count)
    assert counts.min() > 0.8 * 4000 / shards.count


def test_shards_hold_no_more_rows_than_asked() -> None:
    prompts = random_prompts(1, 5000, groups=5000, shared=10, own=10)
    shards = sharded(outlined(prompts), actors=1, rows_per_shard=300)
    assert shards.count == 17
    assert np.bincount(shards.of(hashes(prompts))).max() < 400


def test_few_rows_make_few_shards_but_one_for_each_actor() -> None:
    prompts = random_prompts(1, 100, groups=5, shared=10, own=10)
    assert sharded(outlined(prompts), actors=1).count == 2
    assert sharded(outlined(prompts), actors=6).count == 6
    assert sharded(outlined(prompts[:3]), actors=6).count == 3
    assert sharded(outlined([None] * 5), actors=6).count == 2


def test_the_order_asked_for_is_followed() -> None:
    prompts = random_prompts(1, 2000, groups=20, shared=100, own=10)
    scheduling = Scheduling(order="random", max_running=512, seed=3)
    found = sharded(outlined(prompts), scheduling=scheduling).of(hashes(prompts))
    assert len(set(found[:100].tolist())) == 3


@given(st.lists(st.integers(0, 3), max_size=30))
def test_occurrences_number_equal_rows(values: list[int]) -> None:
    expected = [values[:i].count(value) for i, value in enumerate(values)]
    assert occurrences(np.array(values, np.uint64)).tolist() == expected


def test_shards_are_alike_where_lengths_are_not_known() -> None:
    """Rows of seven prefixes are predicted alike; those of one may take a hundred times what the others do."""
    prompts = random_prompts(1, 7000, groups=7, shared=30, own=400)
    shards = sharded(outlined(prompts))
    kinds = np.unique([prompt[:30] for prompt in prompts], axis=0, return_inverse=True)[1].ravel()
    found = np.zeros((7, shards.count), np.int64)
    np.add.at(found, (kinds, shards.of(hashes(prompts))), 1)
    assert found.max() <= 1.2 * found.mean()
    assert found.min() >= 0.8 * found.mean()


def test_rows_that_all_share_a_long_prefix_are_spread_evenly() -> None:
    prompts = random_prompts(1, 4000, groups=1, shared=1000, own=200)
    shards = sharded(outlined(prompts))
    counts = np.bincount(shards.of(hashes(prompts)), minlength=shards.count)
    assert counts.max() <= 1.1 * counts.mean()
