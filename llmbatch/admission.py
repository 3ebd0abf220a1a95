"""Which chunks of which prompts a step computes, and who is admitted for it.

Compiled, because it runs every step: chunks for what prefills already, in the order of admission, then
admissions from the ends of the plan while the step's budget has room and the predicted peak of KV stays within
the pool. Chunks that do not end a prompt end on a page boundary, so a page that others may read is always
written in the step that publishes it. No work here is proportional to the requests that wait.

Those that wait longest. What was preempted comes back in the order of preemption. A request of the left end that does
not fit is passed over (`llmbatch.passed`), so that what stands behind it goes on; memory is kept for it from then on,
which the right end may not take, and the left end only up to its reserve. Neither may be passed for ever, and
predictions may be wrong for ever. So the one that has waited longest is due after `PREEMPTED_WAITS` or `PASSED_WAITS`
steps, or as many after the one before it entered, and then nobody else enters until it does: the preempted one as soon
as there is room for what it has, whatever is predicted. Hence the bound: while one waits, others enter in at most
(k + 1) such stretches of steps, where k waited already when it began to, and the one that is due enters at the latest
when all that run have ended.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compiled import njit
from llmbatch.ends import BLEND, Account, End, take, turns
from llmbatch.pages import EMPTY, SHARED, UNUSED, admit_pages, adopt, extend, probe
from llmbatch.passed import put_aside, take_aside
from llmbatch.peak import expect, most
from llmbatch.references import by_reference
from llmbatch.slots import ADMISSIONS, DECODING, ENTERED, FREE, PASSED, PREEMPTED, PREFILLING, remove, take_slot
from llmbatch.work import Reach, pairs_of

# In `Chunks.totals`; BEGUN: the step is being decided, OPEN: all that prefills got a chunk.
BUDGET, TOKENS, CHUNKS, CACHED, RECOMPUTED, LEFT, RIGHT, BEGUN, OPEN, PREEMPTED_NOW = range(10)
PREEMPTED_WAITS: Final = 8192.0  # steps; fewer bring long answers back while prompts still want their memory
PASSED_WAITS: Final = 2048.0  # steps; more leave large prompts for the end, with nothing beside them
_MARGIN = 0.03  # of the pool that predictions leave alone
_LEFT_ALONE = 0.10  # of the pool that sequences coming back leave to the left end: they may have made way for it
_NOBODY_DUE, _PREEMPTED_DUE, _PASSED_DUE = range(3)
_NEITHER, _PASSED_OVER = -1, -2  # in place of an end
_LEFT = int(End.LEFT)


@by_reference
class Chunks(NamedTuple):
    """The prefill part of a step while it is being decided."""

    slots: NDArray[np.int32]
    counts: NDArray[np.int32]  # tokens
    samples: NDArray[np.bool_]
    totals: NDArray[np.int64]  # tokens allowed, given, chunks, tokens found, computed again, given to either end
    reach: Reach
    price: NDArray[np.float64]  # [2] tokens of the budget that a query-key pair takes, and one sampled

    @classmethod
    def empty(cls, capacity: int, reach: Reach) -> Chunks:
        """Room for `capacity` chunks."""
        return cls(
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.bool_),
            np.zeros(10, np.int64),
            reach,
            np.zeros(2),
        )

    def grown(self) -> Chunks:
        """The same with twice the room."""
        old = len(self.slots)
        new = Chunks.empty(2 * old, self.reach)
        new.slots[:old], new.counts[:old], new.samples[:old] = self.slots, self.counts, self.samples
        new.totals[:], new.price[:] = self.totals, self.price
        return new


@by_reference
class Limits(NamedTuple):
    """What admission keeps to."""

    pool: float  # tokens
    most_running: int  # sequences
    preempted_waits: float = PREEMPTED_WAITS  # steps before nobody enters but the sequence that was preempted first
    passed_waits: float = PASSED_WAITS  # and before nobody enters but the request that was passed over first


@njit(cache=True)
def prefill(run: Any, pages: Any, chunks: Any) -> bool:
    """Give each prefilling sequence its chunk; whether all of them got one."""
    for i in range(run.counts[PREFILLING]):  # noqa: SIM110 (compiled code knows no all)
        if not give_chunk(run, pages, chunks, run.prefilling[i]):
            return False
    return True


@njit(cache=True)
def give_chunk(run: Any, pages: Any, chunks: Any, slot: int) -> bool:
    """Give a prefilling sequence the chunk that budget and pages allow; False when that is none.

    A sequence that comes back after preemption computes all but its last token, which is then decoded as ever.
    """
    record, totals, size = run.slots[slot], chunks.totals, pages.page_size
    target = record.known if record.known == record.prompt else record.known - 1
    if record.computed % size == 0:
        _find(record, adopt(pages, slot, target), totals)
    start = record.computed
    room = (pages.held[slot] + pages.counts[EMPTY] + pages.counts[UNUSED]) * size - start
    count = min(_affordable(chunks, start, target - start, size), room)
    if start + count < target:
        count = (start + count) // size * size - start
    if count <= 0:
        return False
    extend(pages, slot, start + count)
    again = max(0, min(record.reached - start, count))
    record.recomputed += again
    at = totals[CHUNKS]
    chunks.slots[at] = slot
    chunks.counts[at] = count
    chunks.samples[at] = start + count == record.known
    takes = int(_price(chunks, start, count) + chunks.samples[at] * chunks.price[1])
    totals[CHUNKS] += 1
    totals[TOKENS] += takes
    totals[RECOMPUTED] += again
    totals[LEFT + record.end] += takes
    return True


@njit(cache=True)
def _affordable(chunks: Any, start: int, most: int, page: int) -> Any:
    """How many of `most` tokens after `start` what is left of the budget pays for; the first `page` of a step are."""
    left = chunks.totals[BUDGET] - chunks.totals[TOKENS]
    high = min(most, left)
    low = min(high, page) if chunks.totals[TOKENS] == 0 else 0
    if high > 0 and _price(chunks, start, high) < left + 1:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if _price(chunks, start, middle) < left + 1:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True)
def _price(chunks: Any, start: int, count: int) -> Any:
    """Tokens of the budget that a chunk takes: its own, and its attention as the tokens that take as long."""
    return count + chunks.price[0] * pairs_of(chunks.reach, float(start), count)


@njit(cache=True)
def admit(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, passed: Any, rules: Any, prompts: Any, limits: Any,
    now: float,
) -> bool:  # fmt: skip
    """Admit while the step's budget has room. False when it stopped only because no slot was free."""
    back_full = right_full = False  # what did not fit once in a step does not fit later in it
    tried = 0  # of those passed over
    too_large = np.inf  # tokens of the smallest of them that does not fit
    keeps = rules.kind == BLEND and queue.at[0] <= queue.at[1]
    back = limits.pool * (1.0 - _LEFT_ALONE if keeps else 1.0)  # for what was preempted
    while chunks.totals[TOKENS] < chunks.totals[BUDGET]:
        if run.counts[DECODING] + run.counts[PREFILLING] >= limits.most_running:
            return True
        due = _due(run, passed, limits, now)
        if run.counts[PREEMPTED] > 0 and not back_full and due != _PASSED_DUE:
            slot = run.preempted[0]
            record = run.slots[slot]
            if due == _PREEMPTED_DUE:
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
        if due == _PREEMPTED_DUE or (due == _PASSED_DUE and tried > 0):
            return True
        if run.counts[FREE] == 0:
            return False
        if tried < passed.size[0]:
            request = passed.requests[tried]
            size = prompts[request] + queue.lengths[request]
            pool = limits.pool
            if tried > 0 and rules.kind == BLEND:
                pool -= _wanted(run, passed, queue, prompts)
            if size < too_large and _fits(
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
        end, right_full = _choose(run, pages, peak, chunks, queue, passed, rules, prompts, limits, now, right_full)
        if end == _PASSED_OVER:
            tried += 1
            continue
        if end < 0 or not _begin(run, pages, peak, chunks, queue, prompts, take(queue, end), end, False, now):
            return True
    return True


@njit(cache=True)
def _due(run: Any, passed: Any, limits: Any, now: float) -> int:
    """Which of those that wait longest, if any, nobody may enter before."""
    last = float(run.counts[ENTERED])
    preempted, aside = np.inf, np.inf  # the steps from which on they are due
    if run.counts[PREEMPTED] > 0:
        preempted = max(run.slots[run.preempted[0]].preempted_step, last) + limits.preempted_waits
    if passed.size[0] > 0:
        aside = max(passed.since[0], last) + limits.passed_waits
    if min(preempted, aside) > now:
        return _NOBODY_DUE
    return _PREEMPTED_DUE if preempted <= aside else _PASSED_DUE


@njit(cache=True)
def _choose(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, passed: Any, rules: Any, prompts: Any, limits: Any,
    now: float, right_full: bool,
) -> Any:  # fmt: skip
    """The end whose candidate is admitted next, or what else is done; and whether the right end's does not fit."""
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
    wanted = _wanted(run, passed, queue, prompts)
    for attempt in range(2):
        end = 1 if turn.right_first == (attempt == 0) else 0
        if not (turn.right if end == 1 else turn.left) or (end == 1 and right_full):
            continue
        request = queue.order[queue.at[end]]
        pool = limits.pool - wanted
        if end == 1:
            pool -= turn.reserve
        elif rules.kind != BLEND or run.held[0] - run.held[PASSED] + prompts[request] <= turn.reserve:
            pool = limits.pool
        if _fits(run, pages, peak, chunks, request, prompts[request], queue.lengths[request], pool, now):
            return end, right_full
        right_full = right_full or end == 1
        if end == 0 and passed.size[0] < len(passed.requests):
            put_aside(passed, take(queue, end), now)
            return _PASSED_OVER, right_full
    return _NEITHER, right_full


@njit(cache=True)
def _wanted(run: Any, passed: Any, queue: Any, prompts: Any) -> Any:
    """Compute the tokens kept for the request passed over first, less those that such requests hold already."""
    if passed.size[0] == 0:
        return 0.0
    request = passed.requests[0]
    return max(0.0, prompts[request] + queue.lengths[request] - run.held[PASSED])


@njit(cache=True)
def _begin(
    run: Any, pages: Any, peak: Any, chunks: Any, queue: Any, prompts: Any, request: int, end: int, aside: bool,
    now: float,
) -> bool:  # fmt: skip
    """Admit a request for the first time; there must be a slot. False when it got no chunk."""
    prompt, length = prompts[request], queue.lengths[request]
    slot = take_slot(run, request, prompt, end, aside, prompt + length / 2, length)
    run.slots[slot].admitted_step = np.int32(now)
    return _enter(run, pages, peak, chunks, slot, now)


@njit(cache=True)
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
    return top + shared <= pool - _MARGIN * pages.num_pages * pages.page_size


@njit(cache=True)
def _has_room(run: Any, pages: Any, request: int, known: int) -> Any:
    """Whether there is room now for what a sequence has, and for all that run to go on a little."""
    running = run.counts[DECODING] + run.counts[PREFILLING]
    shared = probe(pages, request)
    return running == 0 or known // pages.page_size + 2 + running - shared <= pages.counts[EMPTY] + pages.counts[UNUSED]


@njit(cache=True)
def _enter(run: Any, pages: Any, peak: Any, chunks: Any, slot: int, now: float) -> bool:
    """Admit a sequence that has a slot, and give it a chunk; False when it got none."""
    record = run.slots[slot]
    target = record.known if record.known == record.prompt else record.known - 1
    _find(record, admit_pages(pages, slot, record.request, target), chunks.totals)
    record.admission = run.counts[ADMISSIONS]
    run.counts[ADMISSIONS] += 1
    run.prefilling[run.counts[PREFILLING]] = slot
    run.counts[PREFILLING] += 1
    start = _start(chunks, record.known, now)
    expect(peak, slot, start + max(record.left, 1.0), private_tokens(pages, record.request, record.known) - start)
    return give_chunk(run, pages, chunks, slot)


@njit(cache=True)
def private_tokens(pages: Any, request: int, tokens: int) -> Any:
    """KV tokens of a sequence beside the shareable pages of its prompt, a page more for rounding."""
    return tokens + (1 - pages.depth[request]) * pages.page_size


@njit(cache=True)
def _start(chunks: Any, known: int, now: float) -> Any:
    """The step before the first of its tokens, if the step's budget were all its own."""
    return now + 1.0 + known / max(chunks.totals[BUDGET], 1)


@njit(cache=True)
def _find(record: Any, tokens: int, totals: Any) -> None:
    """Take tokens found in pages as computed; those found for the first time count as cached."""
    fresh = max(0, min(tokens, record.prompt) - record.reached)
    record.cached += fresh
    record.reached += fresh
    record.computed = tokens
    totals[CACHED] += fresh
