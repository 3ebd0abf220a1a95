"""How one step is decided, as compiled code over a `SchedulerState`.

`llmbatch.scheduler.scheduler` calls `decide_step` once a step, for an engine. `llmbatch.runtime.loops.simulated_loop`
calls it many times inside one compiled loop. Both commit the step before they decide the next one.

Phases. `decide_step` runs these in order; each reads what the ones before it left:

1. Decodes. Where steps have a bound, some of the job's may sit out (`decode_choice.choose_decodes`). Each of the others
   gets the page of its next token (`preemption.hold_decodes`). Where pages run out, the sequence that is cheapest
   to compute again is preempted, and the decodes are counted again.
2. Budget (`token_budget.step_tokens`). From the KV that these decodes read, and from the work that remains, follow the
   tokens that prefills may take; where steps have a bound, no more than it allows.
3. Prefills. Guests get their chunks, and enter (`guest_steps.prefill_guests`). If each has one, each prefilling
   sequence of the job gets its chunk (`chunks.prefill`), in the order of admission. The first that gets none closes the
   step: nobody is admitted past it. So do prompts of guests that have the step to themselves
   (`guest_steps.prompts_apart`).
4. Admissions (`admission.admit`). While budget remains, preempted sequences, those passed over and those at the two
   ends of the plan enter, and get their first chunk at once.
5. Room for prompts (`_make_way`). Only under `Blend` with a closed-loop budget, and only if 3 did not close the step:
   where the pool is full of long answers and half the budget is unused, one long answer is preempted at a time, and 4
   runs again.
6. A way on (`preemption.unblock`). Where the step is still empty, something is admitted whatever the budget says, or
   the newest prefill gives its pages back until the oldest has a chunk.

Forks (`llmbatch.scheduler.forks`) enter behind the chunks that end their prompt, before the next admission and at last.

Re-entry. A step may need more slots than there are, and compiled code cannot make arrays larger. `decide_step` then
returns False between two admissions, `totals.begun` stays True, and the caller doubles the slots (`Scheduler.grow`) and
calls again. 1 and 2 are not repeated; 3 to 6 go on where they stood, as all that they did stands in the state. Between
two steps `begun` is False, and only then may the caller attend to forecasts, rebind or withdraw.

Invariants, when `decide_step` returns True. `Scheduler.check` verifies the lists, the pages and the forecast, and the
property tests of tests/scheduler/test_scheduler.py the rest.

- The step is not empty, and every decoding sequence is in it, but for those that sit out; guests that are due never do.
- A slot is in exactly one of the lists free, decoding, prefilling, preempted.
- Each sequence that runs holds pages for all of its computed tokens and for its chunk; a preempted one holds none.
- A chunk that does not end its prompt ends on a page boundary, so a shared page is written in one step.
- The forecast counts exactly the sequences that run.
- The same state, step number and time give the same step: no clock and no random number is read.

Deciding is not pure: it admits, preempts and allocates while it decides. What it may change, and who else may:

| of the state      | changed while deciding, by                      | changed between two steps, by                  |
|-------------------|-------------------------------------------------|------------------------------------------------|
| `run`             | `admission`, `guest_steps`, `chunks.give_chunk` | `commit.advance`, `lengthen`, `end_sequences`, |
|                   | `preemption.preempt`                            | `withdraw`, `expect_anew`; `Scheduler.attend`; |
|                   |                                                 | replaced by `rebind` and `grow`                |
| `run.held`        | `sequences.take_slot`                           | `sequences.give_slot`, `commit.expect_anew`    |
| `pages`           | `kvcache.allocation` and `growth`, called by    | `kvcache.allocation`, called by `commit`;      |
|                   | `admission`, `forks`, `chunks`, `preemption`    | `kvcache.eviction.give_up`, `kvcache.publish`, |
|                   |                                                 | `shared_reads.start_reading`, called by        |
|                   |                                                 | `commit.advance`; `renumber.carry_pages`       |
| `peak`            | `kv_forecast`, called by `admission` and        | `kv_forecast`, called by `commit`; replaced by |
|                   | `preemption`                                    | `rebind` and `grow`                            |
| `chunks`          | `chunks.give_chunk`, `chunks.note_found`; the   | nobody                                         |
|                   | totals by this module                           |                                                |
| `queue`, `passed` | `admission`, `forks.claim`                      | nobody; replaced by `Scheduler.enqueue` and    |
|                   |                                                 | `rebind`, which also set `queue.taken`         |
| `equal`           | `forks`                                         | `forks.let_go`; replaced by `rebind`           |
| `remaining`       | nobody                                          | `commit.advance`, `lengthen`; replaced by      |
|                   |                                                 | `Scheduler.enqueue`                            |
| `guests`          | `guest_steps`                                   | `commit.advance`, `end_sequences`, `withdraw`; |
|                   |                                                 | replaced by `Scheduler.arrive`                 |
| all else          | nobody                                          | nobody; replaced by `Scheduler`                |
"""

from __future__ import annotations

from typing import Final

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.page_pool import is_full
from llmbatch.perf_model.step_bound import WorkLeft, tokens_within, work_to_end
from llmbatch.scheduler.admission import admit
from llmbatch.scheduler.admission_order import BLEND, is_empty
from llmbatch.scheduler.beside.decode_choice import choose_decodes, step_bound
from llmbatch.scheduler.beside.guest_memory import is_crowded
from llmbatch.scheduler.beside.guest_steps import (
    all_guests_have_chunks,
    count_guests,
    guest_prompts_wait,
    guests_prefill,
    only_flex_waits,
    prefill_guests,
    prompts_apart,
)
from llmbatch.scheduler.chunks import prefill
from llmbatch.scheduler.forks import fork
from llmbatch.scheduler.preemption import hold_decodes, long_victim, preempt, unblock
from llmbatch.scheduler.state import SchedulerState
from llmbatch.scheduler.token_budget import Load, prices, prices_of, step_tokens

LATER_PHASES: Final = (prefill_guests, admit, fork, unblock)  # from the third on; they take what `decide_step` takes


@compiled
def needs_attention(state: SchedulerState, now: float) -> bool:
    """Tell whether something must be done before the next step that compiled code cannot do.

    A sequence outlived its estimate or was preempted since, or tables are too narrow for a decode's next page.
    """
    counts, peak, pages = state.run.counts[0], state.peak, state.pages
    overdue = peak.size[0] > 0 and peak.ends[peak.size[0] - 1] <= now
    too_narrow = pages.counts[0].widest + 1 > pages.tables.shape[1]
    return bool(overdue or counts.preemptions > counts.reestimated_preemptions or too_narrow)


@compiled
def decide_step(state: SchedulerState, now: float) -> bool:
    """Decide the next step, into the state's chunks and pages. False when slots must be added first: call again."""
    counts, totals = state.run.counts[0], state.chunks.totals[0]
    if not totals.begun:
        _begin(state, now)
    if not totals.served:
        if not prefill_guests(state, now):
            return False
        totals.served = True
        totals.budget = totals.job_budget
        totals.apart = prompts_apart(state)
        totals.open = not totals.apart and all_guests_have_chunks(state) and prefill(state)
    if totals.open and not admit(state, now):
        return False
    blends = state.budget.fixed == 0 and state.rules.kind == BLEND
    if totals.open and blends and not _make_way(state, now):
        return False
    if totals.chunks == 0 and counts.riding == 0 and counts.decoding > 0:
        counts.riding = counts.decoding  # whatever the bound says
        hold_decodes(state, now)
    if totals.chunks == 0 and counts.riding == 0:
        # Nothing could go on: admit something, or let the newest give way until the oldest has a page.
        totals.budget = max(totals.budget, state.pages.page_size)
        if counts.prefilling == 0 and not prefill_guests(state, now):
            return False
        if counts.prefilling == 0 and not admit(state, now):
            return False
        unblock(state, now)
    if not fork(state, now):
        return False
    totals.preempted = counts.preemptions - totals.preemptions_before
    totals.begun = False
    return True


@compiled
def _begin(state: SchedulerState, now: float) -> None:
    """Give decodes their pages and prefills their chunks, as far as the step's budget goes."""
    counts, totals = state.run.counts[0], state.chunks.totals[0]
    totals.preemptions_before = counts.preemptions
    count_guests(state)
    prompts_wait = guest_prompts_wait(state)
    choose_decodes(state, prompts_wait)
    kv_tokens = hold_decodes(state, now)
    decodes, work = counts.riding, state.remaining[0]
    totals.begun = True
    totals.served = False
    totals.guests = 0
    totals.tokens = totals.chunks = totals.cached = totals.recomputed = totals.forks = totals.forked = 0
    totals.compute_end_tokens = totals.memory_end_tokens = 0
    compute, memory = work.compute_seconds, work.memory_seconds
    if np.isfinite(state.latency.step_seconds):
        guests = state.guests.counts[0]
        left = WorkLeft(max(compute, 0.0), max(memory, 0.0), guests.compute_rate, guests.memory_rate)
        compute, memory, _ = work_to_end(state.rates, state.latency.exponent, step_bound(state), left)
    load = Load(decodes, kv_tokens, compute, memory)
    totals.pair_price, totals.sample_price, free_tokens = prices(state.budget)
    most = most_of_job = step_tokens(state.budget, load)
    if np.isfinite(state.latency.step_seconds):
        if state.budget.steady:
            most_of_job = int(most_of_job * (1.0 - state.guests.counts[0].holds / state.limits.pool))
        totals.pair_price, totals.sample_price = prices_of(state.rates)
        free_tokens = 0.0
        most = tokens_within(state.rates, state.latency.exponent, step_bound(state), decodes, kv_tokens)
        most_of_job = most if only_flex_waits(state) else min(most, most_of_job)
    totals.free_tokens = free_tokens - decodes
    taken = decodes + int(decodes * totals.sample_price)
    totals.budget = max(state.pages.page_size if prompts_wait or guests_prefill(state) else 0, most - taken)
    totals.job_budget = 0 if is_crowded(state.guests, state.limits.pool) else max(0, most_of_job - taken)


@compiled
def _make_way(state: SchedulerState, now: float) -> bool:
    """Preempt long answers that leave compute idle: the pool is full of them, and nothing that waits can enter.

    Admitted for fewer tokens than they turn out to generate, they grow into the memory kept for the compute end.
    Computing one again takes less than the prompts that could not be computed meanwhile, also after it came back and
    grew: `llmbatch.scheduler.preemption.long_victim` bounds what is computed again by its length.
    False when slots must be added first.
    """
    pages, queue, totals = state.pages, state.queue, state.chunks.totals[0]
    while (
        totals.tokens < state.steering.unused_budget * totals.budget
        and not is_empty(queue)
        and is_full(pages, state.steering.full_pool)
    ):
        slot = long_victim(state, state.steering.long_answer * state.limits.pool)
        if slot < 0:
            break
        preempt(state, slot, now)
        if not admit(state, now):
            return False
    return True
