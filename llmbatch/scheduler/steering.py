"""The constants that steer admission, preemption and the step budget, each with its reason.

*Measured* is what another value does to the fraction of the optimum on Table 2's four mixes, in percentage points, at
25,000 requests (docs/results/sensitivity.json; `benchmarks/sensitivity.py` measures it anew). Constants without it were
chosen by the decision that is named, or by their reason alone. They are data: another value compiles nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llmbatch.compilation.references import by_reference


@by_reference
class Steering(NamedTuple):
    """How the runner and the scheduler steer. Shares are of the pool, waits are in steps."""

    # Those that wait longest (docs/decisions/0020).
    preempted_waits: float = 8192.0  # until the first preempted is due; fewer take memory that prompts still want
    preempted_waits_alone: float = 32_768.0  # until nobody else enters; while others wait with it, compute idles
    passed_waits: float = 2048.0  # until the first passed over is due; more leave large prompts for the end, alone

    # What predictions leave alone. Measured: 0 costs up to 0.3, 0.06 between -1.2 and 0.3.
    margin: float = 0.03
    lean_margin: float = 0.005  # where weights are read beside KV: empty memory costs readings of them (0037)

    # Left to the compute end by sequences that come back: they may have made way for it. Measured: 0 costs up to 7.1,
    # 0.2 changes nothing.
    compute_end_alone: float = 0.10

    # Long answers make way for prompts (docs/decisions/0038).
    full_pool: float = 0.07  # with fewer pages free the pool is full. Measured: 0 costs up to 8.6, 0.14 nothing
    long_answer: float = 0.01  # tokens from which an answer is long. Measured: 0.002 nothing, 0.05 costs up to 2.0
    computed_again: float = 2.0  # times what a long answer holds may be computed again before it gives way no more

    # The reserve of the compute end, as Little's law bounds it. Measured with lengths known: a least of 0 changes the
    # mixes by -0.7 to 3.5, of 0.2 by -2.8 to 2.5; a most of 0.1 or 0.4 changes nothing.
    least_reserve: float = 0.10
    most_reserve: float = 0.20
    wide_reserve: float = 0.30  # the least where lengths are unknown: rows outlive their estimates. 0.1 costs up to 1.7
    wide_reserve_room: float = 0.10  # the most above that least
    # Where weights are read beside KV, empty memory costs (docs/decisions/0037):
    lean_reserve: float = 0.03  # the least, lengths known
    lean_reserve_unknown: float = 0.08  # the least, lengths unknown
    places_behind: int = 512  # behind the memory end's candidate, in which rows are looked for that fit
    filled: float = 0.8  # of the pool on average, as the readings of the weights for each filling are counted

    # Steering by an estimate of lengths (`llmbatch.runtime.shard_run`, docs/decisions/0008 and 0027).
    trust: float = 0.5  # exponent of the estimated C / M. Measured: 0.25 gains 0.7 to 4.6, 0.75 and 1 cost 2.4 to 7.4
    least_ratio: float = 0.85  # of compute to memory time that steps are steered to
    least_ratio_bytes: float = 0.65  # under law `bytes` (docs/decisions/0037)
    most_ratio: float = 1.4

    # When to plan anew.
    shortest_wait: int = 64  # between two plans while the first sample runs, doubling
    longest_wait: int = 512  # Measured: 128 costs up to 0.8; 2048 gains up to 4.1 here, and keeps small jobs waiting
    patience: float = 0.01  # of the job's compute, the longest such wait. Measured: 0 costs up to 0.3, 0.05 nothing
    refresh: int = 256  # between two refreshes of what is known of lengths, at least

    # After a kill (`llmbatch.runtime.shard_run`).
    first_lot: int = 8  # rows, doubling
    lots: int = 5
    lot_alone: int = 32  # steps


STEERING: Final = Steering()
