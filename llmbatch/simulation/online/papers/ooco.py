"""`ooco`: OOCO's scheduling points (3.4) on one engine, whose every step lasts at most the TPOT target.

OOCO has two pools: *relaxed* engines prefill, *strict* ones decode in steps of at most S. One engine is both here, so a
step of at most S holds, in this order:

1. all online requests that decode ("all online requests are always included", Algorithm 2);
2. while time is left, prompts of online requests in order of arrival: of each the longest chunk with L(B) <= S;
3. of the job's rows that decode, those that `select` picks (Algorithm 2, mix decoding selection);
4. if no online prompt waits, prompts of the job: those that have begun, then new ones that the gate lets in (3.4.2).

L is the paper's roofline of operators (`roofline`), fitted to the clock. How gaps were read:

- *Algorithm 2*: K random rows are each kept if L(B + r) <= S; K is not given, 16 here. Then the others by ascending
  length; the longest prefix within S is found by adding one after another, which ends where bisection would.
- *The gate*: prefill a new row if what a larger decode batch saves exceeds the expected recomputation. The paper gives
  no formula. Ours: (T(b) / b - T(b + 1) / (b + 1)) E[left] > P(evicted) x seconds of its prompt alone, T the predicted
  seconds of the decodes of this step, the new row of their mean context; E[left] the mean answer of the job; P(evicted)
  the evictions of rows of the job over its admissions, one of each counted beforehand. Pages for the prompt must be
  free.
- *Eviction* (3.4.1): whole rows, computed again. Where the GEMMs of the step are bound by compute the longest row goes,
  else the shortest ones, until the pages suffice. A row of the job that lacks a page evicts another one likewise.
- *Preemption between layers* (3.4.1) is not needed where no step outlasts S.
- Where online requests alone exceed S the step runs all the same ("best-effort mode", 3.4.4).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.records import Bool, Float64, Int64, Records
from llmbatch.simulation.online.papers.fcfs import last_of
from llmbatch.simulation.online.papers.lanes import enter, front, give_all
from llmbatch.simulation.online.papers.roofline import Roofline, attention_seconds, gemm_seconds, overhead
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState, behind, pages_wanted, take

RANDOM_ROWS: Final = 16  # K of Algorithm 2


class MixedBatch:
    """B: what the step being decided holds, as the predictor counts it."""

    tokens: Int64
    attention: Float64  # s
    decodes: Int64
    decoding: Float64  # s of the decodes' attention
    prefills: Bool


@compiled
def decide(state: RunState, roofline: Roofline, batches: Records[MixedBatch]) -> None:
    """Take rows for the next step."""
    empty(batches)
    batch = batches[0]
    take_online_decodes(state, roofline, batch)
    if not _take_online_prompts(state, roofline, batch):
        take_job_decodes(state, roofline, batch)
        return
    take_job_decodes(state, roofline, batch)
    _take_job_prompts(state, roofline, batch)


@compiled
def empty(batches: Records[MixedBatch]) -> None:
    """Begin a batch of nothing."""
    batch = batches[0]
    batch.tokens = 0
    batch.attention = 0.0
    batch.decodes = 0
    batch.decoding = 0.0
    batch.prefills = False


@compiled
def decodes(state: RunState, number: int) -> bool:
    """Tell whether a row that has begun decodes, and has no other token to compute."""
    row = state.rows[number]
    return row.known > row.prompt and row.computed == row.known - 1


@compiled
def predicted(state: RunState, roofline: Roofline, batch: MixedBatch, number: int, count: int) -> float:
    """Predict L(B + r): the seconds of the batch with `count` tokens of one more row."""
    prefills = batch.prefills or (count > 0 and not decodes(state, number))
    attention = batch.attention + (attention_of(state, roofline, number, count) if count > 0 else 0.0)
    return gemm_seconds(roofline, float(batch.tokens + count)) + attention + overhead(roofline, prefills)


@compiled
def attention_of(state: RunState, roofline: Roofline, number: int, count: int) -> float:
    """Predict the seconds that `count` tokens of a row attend."""
    row = state.rows[number]
    keys = max(row.computed, row.found) + count
    return attention_seconds(roofline, float(count), float(keys), decodes(state, number))


@compiled
def put(state: RunState, roofline: Roofline, batch: MixedBatch, number: int, count: int) -> None:
    """Take `count` tokens of a row into the batch; there must be pages."""
    attention = attention_of(state, roofline, number, count)
    batch.attention += attention
    batch.tokens += count
    if decodes(state, number):
        batch.decodes += 1
        batch.decoding += attention
    else:
        batch.prefills = True
    take(state, number, count)


@compiled
def bound_by_compute(roofline: Roofline, batch: MixedBatch) -> bool:
    """Tell whether another token would make the GEMMs of the batch slower by more than moving it takes."""
    tokens = float(max(1, batch.tokens))
    return gemm_seconds(roofline, 2.0 * tokens) > 1.5 * gemm_seconds(roofline, tokens)


@compiled
def evict(state: RunState, roofline: Roofline, batch: MixedBatch, keep: int) -> bool:
    """Take the pages from a row of the job that is not in the batch (3.4.1); False where there is none but `keep`."""
    longest = bound_by_compute(roofline, batch)
    victim, best = -1, 0
    for i in range(state.active[JOB]):
        number = state.running[JOB, i]
        row = state.rows[number]
        free = number != keep and row.chunk == 0 and row.pages > 0
        if free and (victim < 0 or (row.computed > best) == longest):
            victim, best = number, row.computed
    if victim < 0:
        return False
    give_all(state, victim)
    state.totals[0].evicted += 1
    return True


@compiled
def find_pages(state: RunState, roofline: Roofline, batch: MixedBatch, number: int, count: int) -> bool:
    """Find pages for `count` tokens of a row, of the job's where none are free."""
    while pages_wanted(state, number, count) > state.totals[0].free:
        if not evict(state, roofline, batch, number):
            return False
    return True


@compiled
def take_online_decodes(state: RunState, roofline: Roofline, batch: MixedBatch) -> None:
    """Take all online requests that decode; the job gives pages where they lack some."""
    at = 0
    while at < state.active[ONLINE]:
        number = state.running[ONLINE, at]
        if decodes(state, number):
            while not find_pages(state, roofline, batch, number, 1):
                last = last_of(state, ONLINE)
                give_all(state, last)
                if last == number:
                    return
            put(state, roofline, batch, number, 1)
        at += 1


@compiled
def longest_chunk(state: RunState, roofline: Roofline, batch: MixedBatch, number: int) -> int:
    """Find the most tokens of a row with which the batch stays within the TPOT target."""
    low, high = 0, behind(state, number)
    while low < high:
        middle = (low + high + 1) // 2
        if predicted(state, roofline, batch, number, middle) <= state.rules.tpot:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _take_online_prompts(state: RunState, roofline: Roofline, batch: MixedBatch) -> bool:
    """Take prompts of online requests; whether none waits any longer."""
    for i in range(state.active[ONLINE]):
        number = state.running[ONLINE, i]
        if not decodes(state, number) and not _take_prompt(state, roofline, batch, number):
            return False
    while front(state, ONLINE) >= 0:
        full = state.active[ONLINE] + state.active[JOB] >= state.rules.most_running
        if full and not evict(state, roofline, batch, -1):
            return False
        number = front(state, ONLINE)
        if not _take_prompt(state, roofline, batch, number):
            return False
    return True


@compiled
def _take_prompt(state: RunState, roofline: Roofline, batch: MixedBatch, number: int) -> bool:
    """Take what fits of a prompt, which begins with it or goes on; whether that is all of it."""
    count = max(longest_chunk(state, roofline, batch, number), 0 if state.load[0].rows else 1)
    if count == 0 or not find_pages(state, roofline, batch, number, count):
        return False
    if number == front(state, ONLINE):
        enter(state, ONLINE)
    put(state, roofline, batch, number, count)
    return count == behind(state, number)


@compiled
def select(
    state: RunState, roofline: Roofline, batch: MixedBatch, candidates: NDArray[np.int32], random: int
) -> NDArray[np.int32]:
    """Select rows of the job that decode (Algorithm 2), of `candidates`, `random` of them by chance.

    The batch gets them, if pages are found.
    """
    limit, n = state.rules.tpot, len(candidates)
    rest = candidates.copy()
    tested = min(random, n)
    for i in range(tested):
        j = i + _draw(state, n - i)
        rest[i], rest[j] = rest[j], rest[i]
        if predicted(state, roofline, batch, rest[i], 1) <= limit:
            _decode(state, roofline, batch, rest[i])
    rest = rest[tested:]
    lengths = np.empty(len(rest), np.int64)
    for i in range(len(rest)):
        lengths[i] = state.rows[rest[i]].known
    for number in rest[np.argsort(lengths, kind="mergesort")]:
        if predicted(state, roofline, batch, number, 1) > limit:
            break
        _decode(state, roofline, batch, number)
    return state.chosen[: state.load[0].rows]


@compiled
def _decode(state: RunState, roofline: Roofline, batch: MixedBatch, number: int) -> None:
    if state.rows[number].pages > 0 and find_pages(state, roofline, batch, number, 1):
        put(state, roofline, batch, number, 1)


@compiled
def _draw(state: RunState, below: int) -> int:
    """Draw a whole number below `below` (a linear congruential generator)."""
    totals = state.totals[0]
    totals.draws = (totals.draws * 1103515245 + 12345) % 2147483648
    return (totals.draws >> 8) % below


@compiled
def take_job_decodes(state: RunState, roofline: Roofline, batch: MixedBatch) -> None:
    """Take rows of the job that decode, as Algorithm 2 selects them."""
    candidates = np.empty(state.active[JOB], np.int32)
    found = 0
    for i in range(state.active[JOB]):
        if decodes(state, state.running[JOB, i]):
            candidates[found] = state.running[JOB, i]
            found += 1
    select(state, roofline, batch, candidates[:found], RANDOM_ROWS)


@compiled
def _take_job_prompts(state: RunState, roofline: Roofline, batch: MixedBatch) -> None:
    """Take prompts of the job: those that have begun, then new ones that the gate lets in."""
    at = 0
    while at < state.active[JOB]:
        number = state.running[JOB, at]
        prompts = state.rows[number].chunk == 0 and not decodes(state, number)
        if prompts and not _take_prompt(state, roofline, batch, number):
            return
        at += 1
    while front(state, JOB) >= 0 and state.active[ONLINE] + state.active[JOB] < state.rules.most_running:
        number = front(state, JOB)
        if pages_wanted(state, number, behind(state, number)) > state.totals[0].free:
            return
        count = max(longest_chunk(state, roofline, batch, number), 0 if state.load[0].rows else 1)
        if count == 0 or not gate(state, roofline, batch, number):
            return
        enter(state, JOB)
        state.totals[0].begun += 1
        put(state, roofline, batch, number, count)


@compiled
def gate(state: RunState, roofline: Roofline, batch: MixedBatch, number: int) -> bool:
    """Tell whether a new row of the job is worth its prefill (3.4.2)."""
    if batch.decodes == 0:
        return True
    rows = float(batch.decodes)
    row, each, fixed = state.rows[number], batch.decoding / rows, overhead(roofline, False)
    now = gemm_seconds(roofline, rows) + batch.decoding + fixed
    then = gemm_seconds(roofline, rows + 1.0) + batch.decoding + each + fixed
    saved = (now / rows - then / (rows + 1.0)) * state.rules.expected
    tokens = float(row.prompt - row.found)
    prompt = gemm_seconds(roofline, tokens) + attention_seconds(roofline, tokens, float(row.prompt), False)
    evicted = (state.totals[0].evicted + 1.0) / (state.totals[0].begun + 1.0)
    return saved > evicted * (prompt + overhead(roofline, True))
