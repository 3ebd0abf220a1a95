"""The most window pages that sequences will hold at once (`llmbatch.kvcache.windows`), as a bound.

A sequence never holds more than a window of them, and it holds fewer if it ends before it has that many tokens of its
own. So what those that run will hold is at most the sum of this over them, and what they share of their prompts now.
Unlike the peak of pages (`llmbatch.scheduler.kv_forecast`) it does not ask when they end: most rows are longer than a
window, and hold the same from their prompt to their end. A chunk of a prompt needs window pages for all of its tokens
until it is computed. So a step's tokens stay free beside the bound, or a share of small pools.
"""

from __future__ import annotations

from typing import Final

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.page_pool import PagePool, path_of
from llmbatch.kvcache.windows import least_window_pages, tail_begin, window_room
from llmbatch.scheduler.state import SchedulerState

_CHUNKS: Final = 0.25  # of the window pages, the most that is left to the chunks of a step


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
