"""Whether there is room for a sequence: what it holds by itself, and whether the predicted peak stays in the pool."""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import probe
from llmbatch.kvcache.page_pool import PagePool, room_for
from llmbatch.scheduler.kv_forecast import expect, most
from llmbatch.scheduler.state import SchedulerState, SequenceRecord
from llmbatch.scheduler.window_forecast import windows_fit, windows_have_room


@compiled
def margin_of(state: SchedulerState) -> float:
    """Compute the tokens of the pool that predictions leave alone."""
    return state.limits.margin * state.pages.num_pages * state.pages.page_size


@compiled
def fits(state: SchedulerState, request: int, known: int, length: float, pool: float, now: float) -> bool:
    """Tell whether the predicted peak stays within `pool` tokens if a sequence enters now."""
    counts, pages = state.run.counts[0], state.pages
    if counts.decoding + counts.prefilling == 0:
        return True
    if room_for(pages) == 0:
        return False
    if pages.windows.tokens > 0 and not windows_fit(state, request, private_tokens(pages, request, known) + length):
        return False
    start = start_of(state, known, now)
    top = most(state.peak, start + max(length, 1.0), private_tokens(pages, request, known) - start)
    shared = (pages.counts[0].shared + pages.depth[request] - probe(pages, request)) * pages.page_size
    return bool(top + shared <= pool)


@compiled
def has_room(state: SchedulerState, request: int, known: int) -> bool:
    """Tell whether there is room now for what a sequence has, and for all that run to go on a little."""
    counts, pages = state.run.counts[0], state.pages
    running = counts.decoding + counts.prefilling
    if running > 0 and pages.windows.tokens > 0 and not windows_have_room(pages, known, running):
        return False
    shared = probe(pages, request)
    return (
        running == 0 or known // pages.page_size + 2 + running - shared <= pages.counts[0].free + pages.counts[0].unused
    )


@compiled
def private_tokens(pages: PagePool, request: int, tokens: int) -> int:
    """Count the KV tokens of a sequence beside the shareable pages of its prompt, a page more for rounding."""
    private: int = tokens + (1 - pages.depth[request]) * pages.page_size
    return private


@compiled
def start_of(state: SchedulerState, known: int, now: float) -> float:
    """Find the step before the first of its tokens, if the step's budget were all its own."""
    return now + 1.0 + known / max(state.chunks.totals[0].budget, 1)


@compiled
def foresee(state: SchedulerState, slot: int, record: SequenceRecord, now: float) -> None:
    """Count a sequence that enters now among those that will hold KV."""
    start = start_of(state, record.known, now)
    base = private_tokens(state.pages, record.request, record.known) - start
    expect(state.peak, slot, start + max(record.remaining_tokens, 1.0), base)
