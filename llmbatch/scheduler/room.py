"""Whether there is room for a sequence: what it holds by itself, and whether the predicted peak stays in the pool.

Where layers have windows (`llmbatch.kvcache.windows`), the most window pages that sequences will hold at once are
bounded too. A sequence never holds more than a window of them, and it holds fewer if it ends before it has that many
tokens of its own. So what those that run will hold is at most the sum of this over them, and what they share of their
prompts now. Unlike the peak of pages (`llmbatch.scheduler.kv_forecast`) it does not ask when they end: most rows are
longer than a window, and hold the same from their prompt to their end. A chunk of a prompt needs window pages for all
of its tokens until it is computed. So a step's tokens stay free beside the bound, or a share of small pools.
"""

from __future__ import annotations

from typing import Final

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.allocation import probe
from llmbatch.kvcache.page_pool import PagePool, path_of, room_for
from llmbatch.kvcache.windows import least_window_pages, tail_begin, window_room
from llmbatch.scheduler.beside.guest_memory import kept_free
from llmbatch.scheduler.kv_forecast import expect, most
from llmbatch.scheduler.sequences import SequenceRecord
from llmbatch.scheduler.state import SchedulerState

_CHUNKS: Final = 0.25  # of the window pages, the most that is left to the chunks of a step


@compiled
def margin_of(state: SchedulerState) -> float:
    """Compute the tokens of the pool that predictions leave alone."""
    return state.limits.margin * state.pages.num_pages * state.pages.page_size


@compiled
def fits(state: SchedulerState, request: int, known: int, length: float, pool: float, now: float) -> bool:
    """Tell whether the predicted peak, and what is kept free for guests, stay within `pool` tokens if it enters now."""
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
    return bool(top + shared + kept_free(state.guests, length) <= pool)


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


@compiled
def windows_fit(state: SchedulerState, request: int, private: float) -> bool:
    """Tell whether window pages suffice if a request enters that will hold `private` tokens of its own at its end."""
    pages, peak = state.pages, state.peak
    windows, size = pages.windows, pages.page_size
    most = float(least_window_pages(windows) * size)
    total, shared = min(private, most), windows.num_pages - window_room(windows)
    for i in range(peak.size[0]):
        slot = peak.slots[i]
        total += min(peak.bases[i] + peak.ends[i], most)
        shared -= max(0, pages.held[slot] - max(windows.first[slot], pages.depth[pages.request[slot]]))
    total += (max(0, shared) + _new_tail(pages, request)) * size
    pool = float(windows.num_pages * size)
    chunks = min(float(state.chunks.totals[0].budget), _CHUNKS * pool)
    return bool(total + chunks + state.limits.margin * pool <= pool)


@compiled
def windows_have_room(pages: PagePool, known: int, running: int) -> bool:
    """Tell whether there are window pages now for what a sequence has, and for all that run to go on a little."""
    own = min(known // pages.page_size + 2, least_window_pages(pages.windows))
    return bool(own + running <= window_room(pages.windows))


@compiled
def _new_tail(pages: PagePool, request: int) -> int:
    """Count the pages in the window behind a request's path that lie in no window now."""
    path = path_of(pages, request)
    new = 0
    for node in path[tail_begin(len(path), pages.page_size, pages.windows.tokens) :]:
        page = pages.resident[node]
        if page < 0 or pages.windows.users[page] == 0:
            new += 1
    return new
