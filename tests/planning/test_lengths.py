"""Length estimates follow what was observed, censored rows included."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.pilot_sample import first_sample
from llmbatch.planning.prefix_tree import PrefixTree
from tests.support.paths import TRACES

Ints = NDArray[np.int32]


def forest(groups: int, rows: int, *, prefix: int = 20, tail: int = 4) -> PrefixTree:
    """`groups` x `rows` prompts; row i is in group i // rows, groups share a prefix of their own."""
    rng = np.random.default_rng(0)
    stems = np.repeat(rng.integers(0, 10**6, (groups, prefix)), rows, axis=0)
    prompts = np.hstack((stems, rng.integers(0, 10**6, (groups * rows, tail)))).astype(np.int32)
    return PrefixTree.build(prompts.ravel(), np.arange(groups * rows + 1, dtype=np.int64) * (prefix + tail))


def some(rows: list[int]) -> Ints:
    return np.asarray(rows, np.int32)


def every(n: int) -> Ints:
    return np.arange(n, dtype=np.int32)


def learn(model: LengthModel, rows: Ints, lengths: Ints, *, finished: bool = True) -> None:
    model.observe(rows, lengths.astype(np.int32), np.full(rows.size, finished))
    model.refresh()


def caps(n: int, most: int) -> Ints:
    return np.full(n, most, np.int32)


# --- estimates


def test_before_anything_is_observed_half_the_answers_end_within_256_tokens() -> None:
    model = LengthModel(forest(1, 50), caps(50, 4096))
    mean = model.expected(every(50)).mean
    survival = 256 / (256 + np.arange(4096))
    assert mean == pytest.approx(np.full(50, survival.sum()), rel=0.01)


def test_the_moments_of_a_large_sample_are_recovered() -> None:
    rng = np.random.default_rng(1)
    lengths = np.minimum(np.ceil(rng.exponential(700, 4000)), 20_000).astype(np.int32)
    model = LengthModel(forest(1, 4000), caps(4000, 20_000))
    learn(model, every(4000), lengths)
    mean, second = model.expected(every(1))
    assert mean[0] == pytest.approx(lengths.mean(), rel=0.02)
    assert second[0] == pytest.approx((lengths.astype(float) ** 2).mean(), rel=0.05)


def test_short_answers_are_resolved_to_the_token() -> None:
    lengths = np.tile(np.array([1, 2, 2, 5], np.int32), 500)
    model = LengthModel(forest(1, 2000), caps(2000, 4096))
    learn(model, every(2000), lengths)
    mean, second = model.expected(every(1))
    assert mean[0] == pytest.approx(2.5, rel=0.01)
    assert second[0] == pytest.approx(8.5, rel=0.04)


def test_running_rows_are_censored_and_do_not_bias_to_the_short() -> None:
    rng = np.random.default_rng(2)
    lengths = np.ceil(rng.exponential(700, 4000)).astype(np.int32)
    seen = np.minimum(lengths, rng.integers(1, 1500, 4000)).astype(np.int32)
    model = LengthModel(forest(1, 4000), caps(4000, 20_000))
    model.observe(every(4000), seen, seen == lengths)
    model.refresh()
    assert lengths[seen == lengths].mean() < 450
    assert model.expected(every(1)).mean[0] == pytest.approx(700, rel=0.25)


def test_where_all_run_at_one_place_the_few_that_ended_beside_them_are_not_all_there_were() -> None:
    model = LengthModel(forest(1, 200), caps(200, 131_072))
    generated = np.repeat(np.array([2000, 7950, 8100], np.int32), (20, 3, 77))  # 7950 and 8100 are in one bin
    model.observe(every(100), generated, generated < 8100)
    model.refresh()
    assert model.survival[0, np.searchsorted(model.edges, 8192)] == pytest.approx(0.74, abs=0.03)


def test_rows_that_exhaust_max_tokens_are_expected_to_exhaust_it() -> None:
    model = LengthModel(forest(1, 100), caps(100, 100))
    learn(model, every(30), caps(30, 100))
    mean, second = model.expected(some([99]))
    assert mean[0] == pytest.approx(100)
    assert second[0] == pytest.approx(100**2)


def test_estimates_are_capped_by_each_rows_max_tokens() -> None:
    limits = np.tile(np.array([10, 1000], np.int32), 100)
    model = LengthModel(forest(1, 200), limits)
    learn(model, np.arange(1, 201, 2, dtype=np.int32)[:60], caps(60, 500))
    mean = model.expected(some([0, 199])).mean
    assert mean[0] == pytest.approx(10, rel=0.02)
    assert mean[1] == pytest.approx(500, rel=0.05)


def test_subtrees_are_told_apart() -> None:
    model = LengthModel(forest(2, 200), caps(400, 4096))
    sample = np.concatenate((every(30), every(30) + 200))
    learn(model, sample, np.repeat(np.array([2, 3000], np.int32), 30))
    mean = model.expected(some([199, 399])).mean
    assert mean[0] == pytest.approx(2, rel=0.05)
    assert mean[1] == pytest.approx(3000, rel=0.05)


def test_a_subtree_that_was_not_sampled_takes_its_parents_distribution() -> None:
    model = LengthModel(forest(2, 200), caps(400, 4096))
    learn(model, every(50), caps(50, 40))
    assert model.expected(some([399])).mean[0] == pytest.approx(40, rel=0.05)


def test_keys_tell_rows_apart_that_share_no_prefix() -> None:
    n = 4000
    prompts = np.random.default_rng(3).integers(0, 10**6, (n, 5)).astype(np.int32)
    tree = PrefixTree.build(prompts.ravel(), np.arange(n + 1, dtype=np.int64) * 5)
    keys = (np.arange(n) % 2).astype(np.int32)
    model = LengthModel(tree, caps(n, 4096), keys=keys)
    sample = first_sample(model, tree)
    learn(model, sample, np.where(keys[sample] == 0, 3, 2000))
    mean = model.expected(every(n)).mean
    assert mean[keys == 0].mean() == pytest.approx(3, rel=0.1)
    assert mean[keys == 1].mean() == pytest.approx(2000, rel=0.1)


def test_prompt_lengths_tell_rows_apart_that_share_no_prefix() -> None:
    prompts = np.tile(np.array([10, 300], np.int64), 1500)
    tokens = np.random.default_rng(3).integers(0, 10**6, int(prompts.sum())).astype(np.int32)
    tree = PrefixTree.build(tokens, np.concatenate(([0], np.cumsum(prompts))))
    model = LengthModel(tree, caps(3000, 4096))
    sample = first_sample(model, tree)
    learn(model, sample, np.where(prompts[sample] == 10, 2000, 4))
    mean = model.expected(every(3000)).mean
    assert mean[prompts == 10] == pytest.approx(np.full(1500, 2000), rel=0.1)
    assert mean[prompts == 300] == pytest.approx(np.full(1500, 4), rel=0.1)


def test_a_few_prompts_of_another_length_stay_with_the_others() -> None:
    prompts = np.repeat(np.array([10, 300], np.int64), (980, 20))
    tree = PrefixTree.build(np.arange(prompts.sum(), dtype=np.int32), np.concatenate(([0], np.cumsum(prompts))))
    model = LengthModel(tree, caps(1000, 4096))
    assert model.table_of[980:].tolist() == [0] * 20
    learn(model, every(50), caps(50, 40))
    assert model.expected(some([999])).mean[0] == pytest.approx(40, rel=0.05)


def test_a_subtree_that_was_sampled_more_does_not_outweigh_its_neighbours() -> None:
    tree = forest(3, 1000)
    model = LengthModel(tree, caps(3000, 4096))
    learn(model, np.concatenate((every(400), every(40) + 1000)), np.repeat(np.array([2000, 4], np.int32), (400, 40)))
    assert model.expected(some([2999])).mean[0] == pytest.approx((2000 + 4) / 2, rel=0.1)


def test_few_rows_that_outlive_all_their_neighbours_are_not_thought_to_end_as_these_did() -> None:
    model = LengthModel(forest(10, 400), caps(4000, 100_000))
    ended = np.concatenate([every(40) + 400 * group for group in range(9)])
    learn(model, ended, caps(ended.size, 3))
    learn(model, every(5) + 3600, caps(5, 300), finished=False)
    assert model.expected(some([3999])).mean[0] > 300
    assert model.remaining(some([3600]), some([300])).mean[0] > 300
    assert model.expected(some([399])).mean[0] == pytest.approx(3, rel=0.05)


def test_what_remains_grows_with_what_was_generated_where_tails_are_heavy() -> None:
    lengths = np.ceil(100 * (1 + np.random.default_rng(4).pareto(1.5, 4000))).astype(np.int32)
    model = LengthModel(forest(1, 4000), caps(4000, 50_000))
    learn(model, every(4000), np.minimum(lengths, 50_000))
    left = model.remaining(some([0, 0, 0]), some([100, 400, 1600])).mean
    beyond = [(lengths[lengths > o] - o).mean() for o in (100, 400, 1600)]
    assert left[0] < left[1] < left[2]
    assert left == pytest.approx(beyond, rel=0.25)


def test_a_row_that_outlives_all_that_was_seen_has_a_pareto_tail_left() -> None:
    model = LengthModel(forest(1, 100), caps(100, 100_000))
    learn(model, every(50), caps(50, 200))
    left = model.remaining(some([60, 60]), some([400, 1600])).mean
    assert left[1] / left[0] == pytest.approx(4, rel=0.2)


def test_a_later_observation_replaces_the_former() -> None:
    first, second = (LengthModel(forest(1, 100), caps(100, 4096)) for _ in range(2))
    learn(first, every(40), caps(40, 7), finished=False)
    learn(first, every(40), caps(40, 300), finished=False)
    learn(first, every(40), caps(40, 900))
    learn(second, every(40), caps(40, 900))
    assert first.expected(every(100)).mean == pytest.approx(second.expected(every(100)).mean)


def test_known_lengths_are_taken_as_they_are() -> None:
    known = np.zeros(100, np.int32)
    known[7] = 321
    model = LengthModel(forest(1, 100), caps(100, 4096), known=known)
    mean, second = model.expected(some([7]))
    assert (mean[0], second[0]) == (321.0, 321.0**2)
    assert model.remaining(some([7]), some([300])).mean[0] == 21.0


def test_a_single_token_answer_is_always_known() -> None:
    model = LengthModel(forest(1, 100), caps(100, 1))
    assert (model.expected(every(100)).mean == 1).all()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=60), st.integers(2, 3000))
def test_moments_and_remainders_are_consistent_whatever_was_seen(seen: list[tuple[int, bool]], cap: int) -> None:
    n = 64
    model = LengthModel(forest(2, n // 2), caps(n, cap))
    rows = every(len(seen))
    generated = np.array([g for g, _ in seen], np.int32)
    model.observe(rows, generated, np.array([f for _, f in seen], np.bool_))
    model.refresh()
    mean, second = model.expected(every(n))
    assert (mean >= 1).all()
    assert (mean <= cap * (1 + 1e-9)).all()
    assert (second >= mean**2 * (1 - 1e-9)).all()
    assert (second <= mean * cap * (1 + 1e-9)).all()
    tokens = np.arange(cap, dtype=np.int32)
    left, squared = model.remaining(np.zeros(cap, np.int32), tokens)
    assert (left >= 1).all()
    assert (left <= (cap - tokens) * (1 + 1e-9) + 1e-9).all()
    assert (squared >= left**2 * (1 - 1e-9)).all()
    assert (squared <= left * (cap - tokens) * (1 + 1e-6) + 1e-6).all()
    assert left[0] == pytest.approx(mean[0])
    assert squared[0] == pytest.approx(second[0])
    assert model.remaining(some([0]), some([cap])).mean[0] == 0.0


def test_tables_stay_few_however_many_rows_and_prefixes_there_are() -> None:
    lengths = np.arange(1, 2001)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    chain = PrefixTree.build(np.concatenate([np.arange(k, dtype=np.int32) for k in lengths]), offsets)
    assert LengthModel(chain, caps(2000, 4096)).num_tables <= 2000 // 4
    wide = forest(10_000, 2)
    assert LengthModel(wide, caps(20_000, 4096)).num_tables == 1


def test_max_tokens_below_one_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        LengthModel(forest(1, 2), np.array([4, 0], np.int32))
    assert str(error.value) == "max_tokens must be at least 1, got 0"


# --- small samples of heavy-tailed answers

CAP = 131_072


def population(name: str) -> Ints:
    """Answers whose second moment lies in the longest tenth: video frames, or lognormal."""
    if name == "lognormal":
        drawn = np.random.default_rng(6).lognormal(9.0, 1.0, 6000)
        return np.clip(np.ceil(drawn), 1, CAP).astype(np.int32)
    trace = TRACES / f"{name}.parquet"
    if not trace.exists():
        pytest.skip(f"needs the trace {trace}")
    return np.asarray(pq.read_table(trace, columns=["output_tokens"])["output_tokens"], np.int32)


def half_censored(lengths: Ints, how: str, rng: np.random.Generator) -> tuple[Ints, NDArray[np.bool_]]:
    """What is seen of rows when half of them have ended: all begun at one moment, or one after the other."""
    share = np.ones(lengths.size) if how == "together" else rng.random(lengths.size)
    ran = np.ceil(np.median(lengths / share) * share)
    return np.minimum(lengths, ran).astype(np.int32), lengths <= ran


@pytest.mark.parametrize("how", ["together", "in turn"])
@pytest.mark.parametrize("name", ["lognormal", "video_panda70m"])
def test_a_half_run_sample_of_heavy_tailed_answers_tells_their_second_moment(name: str, how: str) -> None:
    answers = population(name)
    truth = (answers.astype(np.float64) ** 2).mean()
    model = LengthModel(forest(1, 1000), caps(1000, CAP))
    ratios = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        model.observe(every(30), *half_censored(rng.choice(answers, 30), how, rng))
        model.refresh()
        ratios.append(model.expected(some([999])).second_moment[0] / truth)
    assert 0.7 < np.median(ratios) < 1.4


@pytest.mark.parametrize("name", ["lognormal", "video_panda70m"])
def test_the_second_moment_does_not_jump_as_a_sample_runs(name: str) -> None:
    """Sixty rows begun together, looked at each time they have grown by a twentieth."""
    lengths = np.random.default_rng(8).choice(population(name), 60)
    model = LengthModel(forest(1, 1000), caps(1000, CAP))
    believed = []
    age = np.quantile(lengths, 0.25)
    while age < np.quantile(lengths, 0.9):
        model.observe(every(60), np.minimum(lengths, int(age)).astype(np.int32), lengths <= age)
        model.refresh()
        believed.append(model.expected(some([999])).second_moment[0])
        age *= 1.05
    assert np.abs(np.diff(np.log(believed))).max() < np.log(1.5)


# --- answers that have begun


@given(st.integers(0, 2**31), st.integers(1, 300))
@settings(max_examples=20)
def test_of_an_answer_that_has_begun_the_rest_is_estimated_and_the_whole_is_learnt(seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    tree, lengths, begun = forest(1, 100), rng.integers(1, 400, 50).astype(np.int32), np.zeros(100, np.int32)
    begun[:25], begun[60:] = np.minimum(lengths[:25] - 1, tokens), tokens
    whole, rest = LengthModel(tree, caps(100, 500)), LengthModel(tree, caps(100, 500) - begun, begun=begun)
    learn(whole, every(50), lengths)
    learn(rest, every(50), lengths - begun[:50])
    assert rest.survival == pytest.approx(whole.survival)
    waiting = np.arange(50, 100, dtype=np.int32)
    expected, left = rest.expected(waiting), whole.remaining(waiting, begun[waiting])
    assert expected.mean[10:] == pytest.approx(left.mean[10:])
    assert expected.second_moment[10:] == pytest.approx(left.second_moment[10:])
    assert expected.mean[:10] == pytest.approx(whole.expected(waiting[:10]).mean)
    further = rest.remaining(waiting, some([5] * 50))
    assert further.mean == pytest.approx(whole.remaining(waiting, begun[waiting] + some([5])).mean)


def test_of_an_answer_of_known_length_that_has_begun_the_rest_is_known() -> None:
    model = LengthModel(forest(1, 3), some([10, 10, 1]), known=some([7, 0, 0]), begun=some([4, 0, 6]))
    assert model.expected(every(3)).mean[[0, 2]].tolist() == [7, 1]
    assert model.remaining(some([0, 2]), some([2, 0])).mean.tolist() == [5, 1]
