"""Tokens are drawn from the distribution that a row asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit as _njit
from numpy.typing import NDArray

from llmbatch.engine.generation.seeds import mix
from llmbatch.engine.sampling.sampler import sample

Array = NDArray[Any]
njit: Callable[[Callable[..., None]], Callable[..., None]] = _njit


def draw(
    logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seeds: Array | None = None
) -> tuple[Array, Array]:
    n = len(logits)
    tokens, finite = np.full(n, -1, np.int32), np.zeros(n, np.bool_)
    sample(
        logits.astype(np.float32),
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.arange(n, dtype=np.uint64) if seeds is None else seeds,
        np.zeros(n, np.int32),
        tokens,
        finite,
    )
    return tokens, finite


def test_a_temperature_of_zero_takes_the_first_of_the_highest() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 3000)).round(1)
    tokens, finite = draw(logits, temperature=0.0)
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    assert finite.all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_one_logit_that_is_no_number_spoils_its_row_alone(bad: float) -> None:
    logits = np.zeros((3, 2500))
    logits[1, 2400] = bad
    assert draw(logits)[1].tolist() == [True, False, True]


def test_a_row_that_forbids_every_token_is_spoilt_and_one_that_forbids_some_is_not() -> None:
    logits = np.full((2, 10), -np.inf)
    logits[1, 3] = 0.0
    tokens, finite = draw(logits)
    assert finite.tolist() == [False, True]
    assert tokens[1] == 3


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 1.0, 6), (3, 1.0, 3), (0, 0.7, 3), (3, 0.7, 2), (0, 0.01, 1), (99, 1.0, 6)],
)
def test_draws_follow_the_distribution_that_is_left(top_k: int, top_p: float, kept: int) -> None:
    shares = np.array([0.04, 0.3, 0.06, 0.2, 0.25, 0.15])
    logits = np.tile(2.0 * np.log(shares), (20_000, 1))
    tokens, _ = draw(logits, temperature=2.0, top_k=top_k, top_p=top_p)
    expected = np.where(np.isin(np.arange(6), np.argsort(-shares)[:kept]), shares, 0)
    drawn = np.bincount(tokens, minlength=6) / len(tokens)
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.015)
    assert (drawn[expected == 0] == 0).all()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = np.random.default_rng(0).standard_normal((20, 500))
    np.testing.assert_array_equal(draw(logits, temperature=1e-40)[0], logits.argmax(1))


def test_wide_distributions_are_cut_exactly() -> None:
    logits = np.random.default_rng(0).standard_normal((200, 4000))
    tokens, _ = draw(logits, temperature=3.0, top_p=0.5)
    shares = np.exp(logits / 3.0)
    shares /= shares.sum(1, keepdims=True)
    order = np.argsort(-shares, 1)
    before = np.take_along_axis(shares, order, 1).cumsum(1) - np.take_along_axis(shares, order, 1)
    rank = (order == tokens[:, None]).argmax(1)
    assert (np.take_along_axis(before, rank[:, None], 1) < 0.5 + 1e-4).all()
    assert rank.max() > 100


def test_hashes_are_as_published_for_splitmix64() -> None:
    assert [int(mix(np.uint64(1234567), np.uint64(i))) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
