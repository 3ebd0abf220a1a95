"""Which rows an engine without work takes from another one, and when engines join, so that all end at the same time.

Idea. Engines with like shares end apart, since nobody knows how long answers become: a few long ones decide when each
engine ends. BatchGen (5.3) moves suspended sequences to nodes where few run. Here an engine that has ended takes a part
of what the slowest one has left, by what survival tables say of each row at that moment; when it has ended again, it
takes another one. Each move halves what two engines are apart, so a handful even the end.

What is left of an engine takes its compute and its reading of KV, overlapped. It takes as many steps as its longest row
has tokens, or as its rows need to pass through the pool, and each step reads the weights: of a mixture, the experts
that the rows of that step touch, so that steps of its last rows are short. Rows that wait are moved first: they cost
nothing. They are taken from all over the plan's order, in pieces that lie together, so that both engines keep their
blend and most prefixes. A row that has begun moves as tokens, and its KV is computed again where it goes. Nothing moves
unless both end sooner by it, what is computed again included.

Where each engine has a few long rows, a move gains nothing: a step takes as long for one row as for ten, since it reads
the weights. Engines that join share the model and all of their rows (BatchGen's `partition`, 4.2), and each step takes
a part of that time. Joining takes `JOIN_SECONDS` (the paper's Table 2 has 5 to 10 s), and all KV is computed again. The
paper joins engines when few rows are left. Here predicted seconds decide, whatever is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import as_python
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import Rates, padding_seconds, weights_read
from llmbatch.planning.lengths import Expected

Floats = NDArray[np.float64]

_PIECES: Final = 64  # of the rows that wait, most
_LEAST_GAIN: Final = 0.02  # of the seconds that are left
JOIN_SECONDS: Final = 7.5  # that engines take to become one


class RowsLeft(NamedTuple):
    """What an engine has left, in columns by row; the first rows wait, in the order of the plan."""

    rows: NDArray[np.int32]
    waiting: int  # how many of them wait
    compute: Floats  # expected seconds where they are
    memory: Floats  # expected seconds of reading KV
    again: Floats  # seconds of compute more, if the row moves
    steps: Floats  # expected tokens to come
    held: Floats  # expected KV tokens, summed over these steps

    @classmethod
    def of(
        cls,
        cost: CostModel,
        *,
        waiting: NDArray[np.int32],
        begun: NDArray[np.int32],
        generated: NDArray[np.int32],
        computed: NDArray[np.int32],
        prompts: NDArray[np.int32],
        expected: Expected,
        together: NDArray[np.int32],
    ) -> RowsLeft:
        """Count what is left of rows that wait and rows that have begun; `prompts` and `together` are by row.

        `expected` are the tokens to come of both, one after the other; of those that have begun, `generated` are there
        and `computed` tokens have KV.
        """
        rows = np.concatenate((waiting, begun))
        known = prompts[rows].astype(np.float64)
        known[len(waiting) :] += generated
        there = np.concatenate((np.zeros(len(waiting)), computed))
        mean, second = expected
        whole = cost.request_compute(known, mean)
        here = cost.request_compute(known, mean, np.minimum(there, known - 1))
        memory = cost.request_memory(known, mean, second, together[rows])
        return cls(rows, len(waiting), here, memory, whole - here, mean, mean * known + second / 2)


def put_together(lefts: Sequence[RowsLeft]) -> RowsLeft:
    """Put what some engines, one at least, have left together: rows that wait first."""
    begun = np.concatenate([np.arange(len(left.rows)) >= left.waiting for left in lefts])
    order = begun.argsort(kind="stable")
    columns = {
        name: np.concatenate([getattr(left, name) for left in lefts])[order]
        for name in RowsLeft._fields
        if name != "waiting"
    }
    return RowsLeft(waiting=sum(left.waiting for left in lefts), **columns)


def seconds_joined(lefts: Sequence[RowsLeft], cost: CostModel, pool_tokens: float) -> float:
    """Predict the seconds until engines that join have ended all that they have left, at the cost of all as one."""
    left = put_together(lefts)
    whole = np.ones(len(left.rows), np.bool_)
    return JOIN_SECONDS + seconds_left(left, whole, cost, pool_tokens, moved=True)


def pays(before: float, after: float) -> bool:
    """Say whether a change pays by which an end that was `before` seconds away is `after` seconds away."""
    return before - after > _LEAST_GAIN * before


def rows_to_move(left: RowsLeft, cost: CostModel, pool_tokens: float) -> NDArray[np.int32]:
    """Choose the rows that an engine without work takes, int32; none where that would not pay.

    Both engines have a pool of so many tokens.
    """
    before = seconds_of_all(left, cost, pool_tokens)
    moved = _of_waiting(left, cost, pool_tokens) if left.waiting > 1 else _of_begun(left, cost, pool_tokens)
    after = _pair_seconds(left, moved, cost, pool_tokens)
    return left.rows[moved] if pays(before, after) else left.rows[:0]


def seconds_left(
    left: RowsLeft, which: NDArray[np.bool_], cost: CostModel, pool_tokens: float, *, moved: bool = False
) -> float:
    """Predict the seconds of some of the rows on one engine, where they are or where they are `moved` to."""
    compute = float(left.compute[which].sum() + (left.again[which].sum() if moved else 0.0))
    memory = float(left.memory[which].sum())
    rates = cost.rates
    steps, rows = _steps_of(left.steps[which], float(left.held[which].sum()) / pool_tokens, rates)
    fixed = float(steps.sum()) * rates.step_seconds
    compute += float(steps @ as_python(padding_seconds)(rates, rows))
    weights = float(steps @ as_python(weights_read)(rates, rows))
    if rates.weights_share_memory:
        return float(cost.overlap(compute, memory + weights)) + fixed
    return max(float(cost.overlap(compute, memory)), weights) + fixed


def seconds_of_all(left: RowsLeft, cost: CostModel, pool_tokens: float) -> float:
    """Predict the seconds of all rows where they are."""
    return seconds_left(left, np.ones(len(left.rows), np.bool_), cost, pool_tokens)


def _steps_of(answers: Floats, through_pool: float, rates: Rates) -> tuple[Floats, Floats]:
    """Count the steps of rows with so many tokens to come, and the rows that each decodes; float64 [kinds] each.

    Steps that decode as many rows are counted as one kind. There are as many steps as the longest row has tokens, or as
    rows need to pass `through_pool`. In the second case all steps are taken to decode as many rows. So they are for a
    model without experts, whose steps read all weights.
    """
    steps = max(float(answers.max(initial=0.0)), through_pool)
    if rates.expert_share < 1.0 and steps > through_pool:
        return np.diff(np.sort(answers), prepend=0.0), np.arange(len(answers), 0.0, -1.0)
    return np.array([steps]), np.array([float(answers.sum()) / max(steps, 1.0)])


def _pair_seconds(left: RowsLeft, moved: NDArray[np.bool_], cost: CostModel, pool_tokens: float) -> float:
    """Predict when both engines have ended."""
    return max(seconds_left(left, ~moved, cost, pool_tokens), seconds_left(left, moved, cost, pool_tokens, moved=True))


def _of_waiting(left: RowsLeft, cost: CostModel, pool_tokens: float) -> NDArray[np.bool_]:
    """Choose pieces of the rows that wait, evenly over their order: as many as let both end soonest."""
    pieces = min(_PIECES, left.waiting)
    piece = np.full(len(left.rows), -1)
    piece[: left.waiting] = np.arange(left.waiting) * pieces // left.waiting
    best, soonest = np.zeros(len(left.rows), np.bool_), np.inf
    for count in range(1, pieces + 1):
        chosen = np.diff(np.arange(pieces + 1) * count // pieces) > 0
        moved = (piece >= 0) & chosen[piece]
        seconds = _pair_seconds(left, moved, cost, pool_tokens)
        if seconds < soonest:
            best, soonest = moved, seconds
    return best


def _of_begun(left: RowsLeft, cost: CostModel, pool_tokens: float) -> NDArray[np.bool_]:
    """Choose among all rows, the longest first, each where it ends sooner."""
    moved = np.zeros(len(left.rows), np.bool_)
    weight = left.compute + left.memory + left.steps * as_python(weights_read)(cost.rates, 1.0)
    here = there = 0.0
    for row in np.argsort(-weight, kind="stable"):
        if there + weight[row] + left.again[row] < here + weight[row]:
            moved[row] = True
            there += weight[row] + left.again[row]
        else:
            here += weight[row]
    return moved
