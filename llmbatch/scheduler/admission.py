"""Who is admitted for a step.

Compiled, because it runs every step: admissions from the ends of the plan while the step's budget has room and the
predicted peak of KV stays within the pool. No work here is proportional to the requests that wait.

Memory that is empty. A long answer at the right end does not fit where its peak would not, though much of the pool may
be empty for long before that. Where empty memory costs, one of those behind the candidate that does not fit is tried,
another one each step, within `llmbatch.scheduler.admission_order.Blend.behind` places. Those that end before that peak
fit; the candidate keeps its place, and they have given their memory back before it is wanted.

Those that wait longest. What was preempted comes back in the order of preemption. A request of the left end that does
not fit is passed over (`llmbatch.scheduler.passed_over`), so that what stands behind it goes on; memory is kept for it
from then on, which the right end may not take, and the left end only up to its reserve. Neither may be passed for ever,
and predictions may be wrong for ever. So the one that has waited longest is due after `PREEMPTED_WAITS` or
`PASSED_WAITS` steps, or as many after the one before it entered. For one that was passed over nobody else enters then
until it does. One that was preempted enters as soon as there is room for what it has, whatever is predicted. Until then
only the left end's rows enter, a tenth of the pool at most, for what it waits for may run long, and compute would idle;
after `PREEMPTED_WAITS_ALONE` steps nobody. Hence the bound: while one waits, others enter in at most (k + 1) such
stretches of steps, where k waited already when it began to, and the one that is due enters at the latest when all that
run have ended.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.page_pool import EMPTY, SHARED, UNUSED, admit_pages, probe
from llmbatch.scheduler.admission_order import BLEND, Account, End, look_behind, skip, take, turns
from llmbatch.scheduler.chunks import BUDGET, LEFT, RIGHT, TOKENS, give_chunk, note_found
from llmbatch.scheduler.kv_forecast import expect, most
from llmbatch.scheduler.passed_over import put_aside, take_aside
from llmbatch.scheduler.sequences import (
    ADMISSIONS,
    DECODING,
    ENTERED,
    FREE,
    PASSED,
    PREEMPTED,
    PREFILLING,
    remove,
    take_slot,
)

PREEMPTED_WAITS: Final = 8192.0  # steps; fewer bring long answers back while prompts still want their memory
PREEMPTED_WAITS_ALONE: Final = 32_768.0  # steps; while others wait with it, compute idles
PASSED_WAITS: Final = 2048.0  # steps; more leave large prompts for the end, with nothing beside them
MARGIN: Final = 0.03  # of the pool that predictions leave alone
LEAN_MARGIN: Final = 0.005  # and where weights are read beside KV: memory that is empty costs readings of them
_LEFT_ALONE = 0.10  # of the pool that sequences coming back leave to the left end: they may have made way for it
_NOBODY_DUE, _PREEMPTED_DUE, _PREEMPTED_OVERDUE, _PASSED_DUE = range(4)
_NEITHER, _PASSED_OVER = -1, -2  # in place of an end
_LEFT = int(End.LEFT)


@by_reference
class Limits(NamedTuple):
    """What admission keeps to."""

    pool: float  # tokens
    most_running: int  # sequences
    preempted_waits: float = PREEMPTED_WAITS  # steps before the sequence that was preempted first is due
    preempted_waits_alone: float = PREEMPTED_WAITS_ALONE  # and before nobody else enters
    passed_waits: float = PASSED_WAITS  # and before nobody enters but the request that was passed over first
    margin: float = MARGIN  # of the pool that predictions leave alone


@compiled
def admit(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, passed: Any, rules: Any, prompts: Any, limits: Any,
    now: float,
) -> bool:  # fmt: skip
    """Admit while the step's budget has room. False when it stopped only because no slot was free."""
    back_full = right_full = False  # what did not fit once in a step does not fit later in it
    tried = 0  # of those passed over
    too_large = np.inf  # tokens of the smallest of them that does not fit
    keeps = rules.kind == BLEND and queue.at[0] <= queue.at[1]
    margin = _margin(pages, limits)
    back = limits.pool * (1.0 - _LEFT_ALONE if keeps else 1.0) - margin  # for what was preempted
    while chunks.totals[TOKENS] < chunks.totals[BUDGET]:
        if run.counts[DECODING] + run.counts[PREFILLING] >= limits.most_running:
            return True
        due = _due(run, passed, limits, now)
        left_most = _LEFT_ALONE * limits.pool if due == _PREEMPTED_DUE else np.inf  # that the left end may hold
        if run.counts[PREEMPTED] > 0 and not back_full and due != _PASSED_DUE:
            slot = run.preempted[0]
            record = run.slots[slot]
            if due in (_PREEMPTED_DUE, _PREEMPTED_OVERDUE):
                fits = _has_room(run, pages, record.request, record.known)
            else:
                fits = _fits(run, pages, peak, chunks, record.request, record.known, record.left, back, now)
            if fits:
                if passed.size[0] == 0 or record.preempted_step <= passed.since[0]:
                    run.counts[ENTERED] = int(now)
                remove(run.preempted, run.counts, PREEMPTED, slot)
                if not _enter(run, pages, peak, chunks, slot, now):
                    return True
                continue
            back_full = right_full = True  # it comes before the right end's; what the left end admits is soon gone
        if due == _PREEMPTED_OVERDUE or (due == _PASSED_DUE and tried > 0):
            return True
        if run.counts[FREE] == 0:
            return False
        if tried < passed.size[0]:
            request = passed.requests[tried]
            size = prompts[request] + queue.lengths[request]
            pool = limits.pool - margin
            if tried > 0 and rules.kind == BLEND:
                pool -= _wanted(run, passed, queue, prompts)
            if size < min(too_large, left_most - run.held[0]) and _fits(
                run, pages, peak, chunks, request, prompts[request], queue.lengths[request], pool, now
            ):
                if tried == 0 and (
                    run.counts[PREEMPTED] == 0 or passed.since[0] < run.slots[run.preempted[0]].preempted_step
                ):
                    run.counts[ENTERED] = int(now)
                take_aside(passed, tried)
                if not _begin(run, pages, peak, chunks, queue, prompts, request, _LEFT, True, now):
                    return True
                continue
            too_large = min(size, too_large)
            tried += 1
            continue
        if queue.at[0] > queue.at[1]:
            return True
        request, end, right_full = _choose(
            run, pages, peak, chunks, queue, passed, rules, prompts, limits, left_most, now, right_full
        )
        if end == _PASSED_OVER:
            tried += 1
            continue
        if end < 0 or not _begin(run, pages, peak, chunks, queue, prompts, request, end, False, now):
            return True
    return True


@compiled
def _due(run: Any, passed: Any, limits: Any, now: float) -> int:
    """Which of those that wait longest, if any, is due."""
    last = float(run.counts[ENTERED])
    preempted_due, passed_due = np.inf, np.inf  # the steps from which on they are due
    if run.counts[PREEMPTED] > 0:
        preempted_due = max(run.slots[run.preempted[0]].preempted_step, last) + limits.preempted_waits
    if passed.size[0] > 0:
        passed_due = max(passed.since[0], last) + limits.passed_waits
    if min(preempted_due, passed_due) > now:
        return _NOBODY_DUE
    if passed_due < preempted_due:
        return _PASSED_DUE
    alone = preempted_due + limits.preempted_waits_alone - limits.preempted_waits
    return _PREEMPTED_DUE if alone > now else _PREEMPTED_OVERDUE


@compiled
def _choose(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, passed: Any, rules: Any, prompts: Any, limits: Any,
    left_most: float, now: float, right_full: bool,
) -> Any:  # fmt: skip
    """The request that is admitted next, taken, and its end, or what else is done; whether the right end is full."""
    totals = chunks.totals
    account = Account(
        limits.pool,
        float(totals[BUDGET]),
        float(totals[LEFT]),
        float(totals[RIGHT]),
        run.counts[DECODING] + run.counts[PREFILLING] + run.counts[PREEMPTED] == 0,
        run.held[0],
        run.held[1],
    )
    turn = turns(rules, queue, prompts, account)
    request = np.int32(0)
    wanted, margin = _wanted(run, passed, queue, prompts), _margin(pages, limits)
    for attempt in range(2):
        end = 1 if turn.right_first == (attempt == 0) else 0
        if not (turn.right if end == 1 else turn.left) or (end == 1 and right_full):
            continue
        request = queue.order[queue.at[end]]
        if end == 0 and run.held[0] + prompts[request] > left_most:
            continue
        pool = limits.pool - margin - wanted
        if end == 1:
            pool -= turn.reserve
        elif rules.kind != BLEND or run.held[0] - run.held[PASSED] + prompts[request] <= turn.reserve:
            pool = limits.pool - margin
        if _fits(run, pages, peak, chunks, request, prompts[request], queue.lengths[request], pool, now):
            return take(queue, end), end, right_full
        if end == 1 and rules.behind > 0:
            behind = look_behind(rules, queue)
            if behind >= 0 and _fits(
                run, pages, peak, chunks, behind, prompts[behind], queue.lengths[behind], pool, now
            ):
                queue.taken[behind] = True
                skip(queue)
                return behind, end, right_full
        right_full = right_full or end == 1
        if end == 0 and passed.size[0] < len(passed.requests):
            put_aside(passed, take(queue, end), now)
            return request, _PASSED_OVER, right_full
    return request, _NEITHER, right_full


@compiled
def _wanted(run: Any, passed: Any, queue: Any, prompts: Any) -> Any:
    """Compute the tokens kept for the request passed over first, less those that such requests hold already."""
    if passed.size[0] == 0:
        return 0.0
    request = passed.requests[0]
    return max(0.0, prompts[request] + queue.lengths[request] - run.held[PASSED])


@compiled
def _margin(pages: Any, limits: Any) -> Any:
    """Compute the tokens of the pool that predictions leave alone."""
    return limits.margin * pages.num_pages * pages.page_size


@compiled
def _begin(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, prompts: Any, request: int, end: int, aside: bool,
    now: float,
) -> bool:  # fmt: skip
    """Admit a request for the first time; there must be a slot. False when it got no chunk."""
    prompt, length = prompts[request], queue.lengths[request]
    slot = take_slot(run, request, prompt, end, aside, prompt + length / 2, length)
    run.slots[slot].admitted_step = np.int32(now)
    return _enter(run, pages, peak, chunks, slot, now)


@compiled
def _fits(
    run: Any, pages: Any, peak: Any, chunks: Any, request: int, known: int, length: float, pool: float, now: float
) -> Any:
    """Whether the predicted peak stays within `pool` tokens if a sequence enters now."""
    if run.counts[DECODING] + run.counts[PREFILLING] == 0:
        return True
    if pages.counts[EMPTY] + pages.counts[UNUSED] == 0:
        return False
    start = _start(chunks, known, now)
    top = most(peak, start + max(length, 1.0), private_tokens(pages, request, known) - start)
    shared = (pages.counts[SHARED] + pages.depth[request] - probe(pages, request)) * pages.page_size
    return top + shared <= pool


@compiled
def _has_room(run: Any, pages: Any, request: int, known: int) -> Any:
    """Whether there is room now for what a sequence has, and for all that run to go on a little."""
    running = run.counts[DECODING] + run.counts[PREFILLING]
    shared = probe(pages, request)
    return running == 0 or known // pages.page_size + 2 + running - shared <= pages.counts[EMPTY] + pages.counts[UNUSED]


@compiled
def _enter(run: Any, pages: Any, peak: Any, chunks: Any, slot: int, now: float) -> bool:
    """Admit a sequence that has a slot, and give it a chunk; False when it got none."""
    record = run.slots[slot]
    target = record.known if record.known == record.prompt else record.known - 1
    note_found(record, admit_pages(pages, slot, record.request, target), chunks.totals)
    record.admission = run.counts[ADMISSIONS]
    run.counts[ADMISSIONS] += 1
    run.prefilling[run.counts[PREFILLING]] = slot
    run.counts[PREFILLING] += 1
    start = _start(chunks, record.known, now)
    expect(peak, slot, start + max(record.left, 1.0), private_tokens(pages, record.request, record.known) - start)
    return give_chunk(run, pages, chunks, slot)


@compiled
def private_tokens(pages: Any, request: int, tokens: int) -> Any:
    """KV tokens of a sequence beside the shareable pages of its prompt, a page more for rounding."""
    return tokens + (1 - pages.depth[request]) * pages.page_size


@compiled
def _start(chunks: Any, known: int, now: float) -> Any:
    """The step before the first of its tokens, if the step's budget were all its own."""
    return now + 1.0 + known / max(chunks.totals[BUDGET], 1)
