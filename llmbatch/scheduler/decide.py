"""One step decided and taken note of, as compiled code over the scheduler's columns.

`llmbatch.scheduler.scheduler` calls these step by step for an engine; `llmbatch.runtime.simulated_loop` many times in
one call for a simulated one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_pool import EMPTY, UNUSED, WIDEST, PagePool
from llmbatch.perf_model.work import Rates, compute_seconds
from llmbatch.scheduler.admission import Limits, admit
from llmbatch.scheduler.admission_order import BLEND, EndRules, TwoEndedQueue
from llmbatch.scheduler.chunks import BEGUN, BUDGET, CHUNKS, OPEN, PREEMPTED_NOW, TOKENS, StepBuilder, prefill
from llmbatch.scheduler.commit import hold_decodes, long_victim, preempt, unblock
from llmbatch.scheduler.kv_forecast import KVForecast
from llmbatch.scheduler.passed_over import Passed
from llmbatch.scheduler.sequences import DECODING, PREEMPTED, PREEMPTIONS, PREFILLING, RECKONED, SequenceTable
from llmbatch.scheduler.token_budget import BudgetRules, Load, prices, step_tokens

COMPUTE, MEMORY = 0, 1  # in `SchedulerState.left`
_FULL = 0.07  # of the pool's pages: with fewer free it is full
_LONG = 0.01  # of the pool: tokens generated from which an answer is long


@by_reference
class SchedulerState(NamedTuple):
    """Everything a step is decided from."""

    run: SequenceTable
    pages: PagePool
    peak: KVForecast
    chunks: StepBuilder
    queue: TwoEndedQueue
    passed: Passed
    rules: EndRules
    budget: BudgetRules
    prompts: NDArray[np.int32]  # by request: tokens
    limits: Limits
    rates: Rates
    left: NDArray[np.float64]  # [2] seconds of compute and of KV reads of everything not yet done, as it was estimated


@compiled
def is_done(core: Any) -> Any:
    """Nothing runs and nothing waits."""
    counts = core.run.counts
    waits = core.queue.at[0] <= core.queue.at[1] or core.passed.size[0] > 0
    return not waits and counts[DECODING] + counts[PREFILLING] + counts[PREEMPTED] == 0


@compiled
def needs_attention(core: Any, now: float) -> Any:
    """Whether something must be done before the next step that compiled code cannot do.

    A sequence outlived its estimate or was preempted since, or tables are too narrow for a decode's next page.
    """
    run, peak, pages = core.run, core.peak, core.pages
    overdue = peak.size[0] > 0 and peak.ends[peak.size[0] - 1] <= now
    return overdue or run.counts[PREEMPTIONS] > run.counts[RECKONED] or pages.counts[WIDEST] + 1 > pages.tables.shape[1]


@compiled
def decide_step(core: Any, now: float) -> Any:
    """Decide the next step, into the core's chunks and pages. False when slots must be added first: call again."""
    run, pages, peak, chunks = core.run, core.pages, core.peak, core.chunks
    totals = chunks.totals
    if not totals[BEGUN]:
        before = run.counts[PREEMPTIONS]
        kv_tokens = hold_decodes(run, pages, peak, core.rates, now)
        totals[:] = 0
        totals[BEGUN] = 1
        totals[PREEMPTED_NOW] = run.counts[PREEMPTIONS] - before
        decodes = run.counts[DECODING]
        load = Load(decodes, kv_tokens, core.left[COMPUTE], core.left[MEMORY])
        chunks.price[0], chunks.price[1], free = prices(core.budget)
        chunks.price[2] = free - decodes
        totals[BUDGET] = max(0, step_tokens(core.budget, load) - decodes - int(decodes * chunks.price[1]))
        totals[OPEN] = prefill(run, pages, chunks)
    if totals[OPEN] and not _admit(core, now):
        return False
    if totals[OPEN] and core.budget.fixed == 0 and core.rules.kind == BLEND and not _make_way(core, now):
        return False
    if totals[CHUNKS] == 0 and run.counts[DECODING] == 0:
        # Nothing could go on: admit something, or let the newest give way until the oldest has a page.
        totals[BUDGET] = max(totals[BUDGET], pages.page_size)
        if run.counts[PREFILLING] == 0 and not _admit(core, now):
            return False
        before = run.counts[PREEMPTIONS]
        unblock(run, pages, peak, chunks, now)
        totals[PREEMPTED_NOW] += run.counts[PREEMPTIONS] - before
    totals[BEGUN] = 0
    return True


@compiled
def charge(core: Any, tokens: int, samples: int, pairs: float, read: float) -> None:
    """Take a step's work from what is left to do."""
    rates, left = core.rates, core.left
    left[COMPUTE] -= compute_seconds(rates, tokens, samples, pairs)
    left[MEMORY] -= read * rates.seconds_per_kv_token


@compiled
def _make_way(core: Any, now: float) -> bool:
    """Preempt long answers that leave compute idle: the pool is full of them, and nothing that waits can enter.

    Admitted for fewer tokens than they turn out to generate, they grow into the memory that is kept for the left end.
    Computing one again takes less than the prompts that could not be computed meanwhile, also after it came back and
    grew: `llmbatch.scheduler.commit.long_victim` bounds what is computed again by its length.
    False when slots must be added first.
    """
    run, pages, totals = core.run, core.pages, core.chunks.totals
    while (
        2 * totals[TOKENS] < totals[BUDGET]
        and core.queue.at[0] <= core.queue.at[1]
        and pages.counts[EMPTY] + pages.counts[UNUSED] < _FULL * pages.num_pages
    ):
        slot = long_victim(run, pages, core.rates, _LONG * core.limits.pool)
        if slot < 0:
            break
        preempt(run, pages, core.peak, slot, now)
        totals[PREEMPTED_NOW] += 1
        if not _admit(core, now):
            return False
    return True


@compiled
def _admit(core: Any, now: float) -> Any:
    return admit(
        core.run,
        core.pages,
        core.peak,
        core.chunks,
        core.queue,
        core.passed,
        core.rules,
        core.prompts,
        core.limits,
        now,
    )
