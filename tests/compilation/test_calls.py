"""Calls of compiled code whose types are found once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference


@by_reference
class Inner(NamedTuple):
    values: NDArray[np.float64]


@by_reference
class Pair(NamedTuple):
    inner: Inner
    counts: NDArray[np.int32]
    factor: float


@compiled
def total(pair: Pair, more: float) -> float:
    """Add up, and count the call."""
    pair.counts[0] += 1
    return float(pair.factor * pair.inner.values.sum() + more)


def pair_of(*values: float, factor: float = 2.0) -> Pair:
    return Pair(Inner(np.array(values)), np.zeros(1, np.int32), factor)


def test_a_call_gives_what_the_function_gives_and_changes_the_same_arrays() -> None:
    pair = pair_of(1.0, 2.0)
    assert [call(total, pair, 0.5), call(total, pair, 1.5), total(pair, 0.5)] == [6.5, 7.5, 6.5]
    assert pair.counts[0] == 3


def test_an_instance_that_is_replaced_is_read_as_it_is_now() -> None:
    pair = pair_of(1.0, 2.0)
    assert call(total, pair, 0.0) == 6.0
    assert call(total, pair._replace(factor=3.0), 0.0) == 9.0
    assert call(total, pair._replace(inner=Inner(np.array([5.0]))), 0.0) == 10.0


def test_arrays_of_other_types_get_code_of_their_own() -> None:
    pair = pair_of(1.0, 2.0)
    assert call(total, pair, 0.0) == 6.0
    assert call(total, pair._replace(inner=Inner(np.array([1.5], np.float32))), 0.0) == 3.0
    assert call(total, pair._replace(inner=Inner(np.arange(6.0)[::2])), 0.0) == 12.0
