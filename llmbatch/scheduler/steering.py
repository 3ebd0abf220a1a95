"""The constants that steer admission, preemption and the step budget, each with its reason.

*Measured* is what another value does to the fraction of the optimum on Table 2's four mixes at 25,000 requests, as
"value: least to most change", in percentage points, gains positive (docs/results/tables.md, "Constants of the
scheduler"; `python benchmarks/clock/sensitivity.py --requests 25000` measures it anew). On a single job chance moves a
figure by about a point, so constants are chosen on many seeds, by the decisions that are named. They are data: another
value compiles nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llmbatch.compilation.references import by_reference


@by_reference
class Steering(NamedTuple):
    """How `llmbatch.runtime.shard_run` and the scheduler steer. Shares are of the pool, waits are in steps."""

    # Those that wait longest (docs/decisions/0020).
    # Until the first preempted is due; fewer take memory that prompts still want. Measured: 2048: -2.1 to 0;
    # 32768: 0 to 0.5.
    preempted_waits: float = 8192.0
    # Until nobody else enters; while others wait with it, compute idles. Measured: 8192 and 131072: nothing.
    preempted_waits_alone: float = 32_768.0
    # Until the first passed over is due; more leave large prompts for the end, alone. Measured: 512 and 8192: nothing.
    passed_waits: float = 2048.0

    # The share that predictions leave alone. Measured: 0: -0.8 to 1.7; 0.06: -1.1 to 0.3.
    margin: float = 0.03
    # The same if weights are read beside KV: empty memory costs readings of them (0037). Measured: 0: -0.1 to 0.4;
    # 0.03: -0.1 to 1.9.
    lean_margin: float = 0.005

    # The share of the pool that returning sequences leave to the compute end, which they may have been preempted for.
    # Measured: 0: -0.5 to 0; 0.2: -0.2 to 0.7.
    compute_end_alone: float = 0.10

    # Long answers are preempted for prompts (docs/decisions/0038).
    full_pool: float = 0.07  # with fewer pages free the pool is full. Measured: 0: -7.2 to 0; 0.14: nothing
    long_answer: float = 0.01  # tokens from which an answer is long. Measured: 0.002: nothing; 0.05: -0.1 to 0
    computed_again: float = 2.0  # times a long answer's length, the most computed again. Measured: 0.5, 8: nothing
    unused_budget: float = 0.5  # of a step's budget: with less of it used, compute idles

    # The reserve of the compute end, as Little's law bounds it. A least of lengths known; the most above it.
    least_reserve: float = 0.10  # Measured: 0: -0.5 to 3.4; 0.05: -0.4 to 1.4; 0.2: -2.9 to 2.0
    most_reserve: float = 0.20  # Measured: 0.1 and 0.4: nothing
    # The least where lengths are unknown: rows outlive their estimates. Measured: 0.1: -0.9 to 1.7; 0.2: -2.0 to 1.2;
    # 0.4: -8.0 to 1.0; 0.5: -7.0 to 0.7.
    wide_reserve: float = 0.30
    wide_reserve_room: float = 0.10  # the most above that least. Measured: 0 and 0.2: nothing
    # Where weights are read beside KV, empty memory costs (docs/decisions/0037):
    lean_reserve: float = 0.03  # the least, lengths known. Measured: 0: -0.2 to 1.6; 0.1: -5.6 to 0.5
    lean_reserve_unknown: float = 0.08  # the least, lengths unknown. Measured: 0: -0.4 to 1.5; 0.2: -0.4 to 2.2
    # Behind the memory end's candidate, in which rows are looked for that fit. Measured: 64 and 4096: nothing.
    places_behind: int = 512
    # Of the pool on average, as the readings of the weights for each filling are counted. Measured: 0.6: -0.2 to 0.6;
    # 1: -2.4 to -0.1.
    filled: float = 0.8

    # Steering by an estimate of lengths (`llmbatch.runtime.shard_run`, docs/decisions/0008 and 0027).
    trust: float = 0.5  # exponent of the estimated C / M. Measured: 0: -3.0 to -0.8; 0.25: -1.3 to 0.3; 1: -0.5 to 0.2
    # Of compute to memory time that steps are steered to. Measured: 0.5: -4.5 to -0.4; 0.7: -2.2 to -0.1;
    # 1: -4.7 to 1.0.
    least_ratio: float = 0.85
    least_ratio_bytes: float = 0.65  # under law `bytes` (0037). Measured: 0.4: -2.5 to -0.6; 0.85: -1.8 to 4.1
    most_ratio: float = 1.4  # Measured: 1.2: -1.5 to 0; 2: -0.3 to 0; 4: -0.1 to 0

    # When to plan anew.
    shortest_wait: int = 64  # between two plans while the first sample runs, doubling. Measured: 16, 256: -0.4 to 0.2
    # Measured: 128: -0.1 to 1.6; 2048: 0.1 to 0.6, and keeps small jobs waiting.
    longest_wait: int = 512
    patience: float = 0.01  # of the job's compute, the longest such wait. Measured: 0: -1.1 to 2.1; 0.05: nothing
    # Between two refreshes of what is known of lengths, at least. Measured: 64: 0 to 0.5; 1024: -0.9 to 0.1.
    refresh: int = 256
    refresh_share: int = 16  # one refresh for so many steps of the age: their number grows with its logarithm
    replan_age: int = 2  # times the age of the last plan, at which lengths that were learnt since are worth another

    # After a kill (`llmbatch.runtime.shard_run`): rows are answered soon, in lots that double. Not measured: no
    # simulated job is killed.
    first_lot: int = 8  # rows
    lots: int = 5
    lot_alone: int = 32  # steps


STEERING: Final = Steering()
