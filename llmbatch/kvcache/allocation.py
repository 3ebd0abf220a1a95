"""How slots get pages when they are given to requests, and give them back.

The caller makes sure of room first: pages that are free, and unused ones, which are evicted for it
(`llmbatch.kvcache.page_pool.room_for`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.contents import forget_contents, index, is_named
from llmbatch.kvcache.eviction import evict, expect_requests, publish_as, recall
from llmbatch.kvcache.growth import take_page
from llmbatch.kvcache.page_pool import FREE, NOBODY, PagePool, path_of
from llmbatch.kvcache.page_worth import given_up, insert, planned, remove
from llmbatch.kvcache.shared_reads import stop_reading
from llmbatch.kvcache.windows import drop_window_page, enter_window, first_page, leave_window


@compiled
def probe(pages: PagePool, request: int) -> int:
    """Count how many of a request's shareable pages others use now; changes nothing."""
    used = 0
    for node in path_of(pages, request):
        page = pages.resident[node]
        if page >= 0 and pages.users[page] > 0:
            used += 1
    return used


@compiled
def admit_pages(pages: PagePool, slot: int, request: int, prompt: int) -> int:
    """Give a slot to a request, with the pages of its prompt that are there. Returns tokens found.

    A sequence that comes back to its slot finds its own pages too, as far as nobody else has needed them.
    """
    assert pages.request[slot] < 0, "a slot is given twice"
    pages.request[slot] = request
    name_sequence(pages, slot)
    found = adopt(pages, slot, prompt)
    expect_requests(pages, request, -1)
    return found


@compiled
def name_sequence(pages: PagePool, slot: int) -> None:
    """Give a number to the sequence of a slot, if it has none."""
    if pages.sequence[slot] == NOBODY:
        pages.sequence[slot] = pages.counts[0].sequences
        pages.counts[0].sequences += 1


@compiled
def fork_pages(pages: PagePool, slot: int, request: int, lead: int, prompt: int) -> tuple[int, int]:
    """Give a slot to a request whose prompt, of so many tokens, is in the pages of another one, which leads.

    Full pages are shared. Returns the page in which the prompt ends and the one that its KV is to be copied to, or -1
    twice where it ends with a page. The caller has made sure of room; there must be no windows.
    """
    assert pages.windows.tokens == 0, "a sequence with window pages is forked"
    assert pages.request[slot] < 0, "a slot is given twice"
    pages.request[slot] = request
    name_sequence(pages, slot)
    whole = prompt // pages.page_size
    for i in range(whole):
        page = pages.tables[lead, i]
        pages.users[page] += 1
        pages.tables[slot, i] = page
    pages.held[slot] = whole
    expect_requests(pages, request, -1)
    if prompt % pages.page_size == 0:
        return -1, -1
    if pages.counts[0].free == 0:
        evict(pages, 1)
    return pages.tables[lead, whole], take_page(pages, slot)


@compiled
def adopt(pages: PagePool, slot: int, prompt: int) -> int:
    """Take over pages of the slot's prompt that others have published since. Returns tokens now held in full.

    To be called when the slot's computed tokens end on a page boundary. The last of `prompt` tokens is never
    found: it must be computed. Nor are those from `Prompts.findable` on, since the token before it gives what is told
    of it. Where layers have windows, what is found ends where the window before is there.
    """
    request = pages.request[slot]
    path = path_of(pages, request)
    if len(pages.prompts.findable) > 0:
        prompt = min(prompt, pages.prompts.findable[request])
    depth = (prompt - 1) // pages.page_size
    windowed = pages.windows.tokens > 0
    if windowed:
        depth = _last_with_window(pages, slot, depth, path)
        _move_window(pages, slot, depth)
    while pages.held[slot] < depth:
        position = pages.held[slot]
        page = pages.resident[path[position]] if position < len(path) else -1
        if page < 0:
            page = recall(pages, slot, position)
            if page < 0:
                break
            if position < len(path):
                publish_as(pages, page, path[position])
        if windowed and position >= pages.windows.first[slot]:
            enter_window(pages.windows, slot, position, page)
        if pages.users[page] == 0:
            remove(pages.worth, page)
            pages.counts[0].unused -= 1
            pages.counts[0].shared += pages.node[page] >= 0
            pages.owner[page] = NOBODY
        pages.users[page] += 1
        pages.tables[slot, position] = page
        pages.held[slot] += 1
    tokens: int = pages.held[slot] * pages.page_size
    return tokens


@compiled
def release(pages: PagePool, slot: int, computed: int, again: bool) -> None:
    """Take a slot's pages back. `again`: its request was preempted and will be admitted again.

    Pages that can be found again stay, where their KV is in the `computed` tokens. The end of a sequence goes first.
    So does the page in which an answer ends, for what goes on with it, unless the window before it may be gone.
    """
    if again:
        expect_requests(pages, pages.request[slot], 1)
    stop_reading(pages.reads, pages.tables, slot)
    whole = computed // pages.page_size
    contents, worth, windows = pages.contents, pages.worth, pages.windows
    windowed = windows.tokens > 0
    by_name = len(pages.prompts.tokens) > 0
    # Calls in this loop take no `pages`: a call's cost grows with the arrays that it is given.
    for i in range(pages.held[slot] - 1, -1, -1):
        page = pages.tables[slot, i]
        pages.users[page] -= 1
        number = pages.node[page]
        in_window = windowed and i >= windows.first[slot]
        if pages.users[page] > 0:
            if in_window:
                leave_window(windows, page, number, False, 0)
            continue
        pages.counts[0].shared -= number >= 0
        to_come = pages.remaining[number] if number >= 0 else (1 if again else 0)
        # What has no name has generated tokens, and is named when they are known (`llmbatch.kvcache.publish`).
        found = by_name and i < whole and (index(contents, page) or not is_named(contents, page))
        ends_here = by_name and not windowed and not again and i == whole and i * pages.page_size < computed
        if (i < whole and (to_come > 0 or found)) or (ends_here and number < 0 and not is_named(contents, page)):
            pages.counts[0].unused += 1
            if number < 0:
                pages.owner[page] = pages.sequence[slot]
            value = planned(to_come, number) if number >= 0 and to_come > 0 else given_up(worth, to_come)
            insert(worth, page, value)
            if in_window:
                leave_window(windows, page, number, True, 1 if again else 0)
            continue
        if in_window:
            leave_window(windows, page, -1, False, 0)
        elif windowed:
            drop_window_page(windows, page)
        if number >= 0:
            pages.resident[number] = -1
        if by_name:
            forget_contents(contents, page)
        pages.node[page] = FREE
        pages.free[pages.counts[0].free] = page
        pages.counts[0].free += 1
    if windowed:  # what a slot held longer ago is found in its table no more
        pages.tables[slot, pages.held[slot] :] = -1
        windows.first[slot] = 0
    pages.held[slot] = 0
    pages.request[slot] = -1
    if not again:
        pages.sequence[slot] = NOBODY


@compiled
def slide_window(pages: PagePool, slot: int, computed: int) -> None:
    """Give back what falls out of a slot's window, of which so many tokens are computed; there must be windows."""
    _move_window(pages, slot, computed // pages.page_size)


@compiled
def _move_window(pages: PagePool, slot: int, place: int) -> None:
    """Move a slot's window to that of a sequence of `place` full pages; those that it does not hold yet enter later."""
    windows = pages.windows
    first = first_page(place * pages.page_size, pages.page_size, windows.tokens)
    while windows.first[slot] < first:
        if windows.first[slot] < pages.held[slot]:
            page = pages.tables[slot, windows.first[slot]]
            leave_window(windows, page, pages.node[page], False, 0)
        windows.first[slot] += 1


@compiled
def _last_with_window(pages: PagePool, slot: int, depth: int, path: NDArray[np.int32]) -> int:
    """Find the last place, in pages, up to which a slot's next pages are there with the window before it.

    Those that are there, up to `depth`, are written into its table behind what it holds.
    """
    windows, size = pages.windows, pages.page_size
    last: int = pages.held[slot]
    position, covered = last, last - windows.first[slot]  # covered: pages right before that have window pages
    while position < depth:
        page = pages.resident[path[position]] if position < len(path) else -1
        if page < 0:
            page = recall(pages, slot, position)
            if page < 0:
                break
        pages.tables[slot, position] = page
        position += 1
        covered = covered + 1 if windows.page[page] >= 0 else 0
        if covered >= position - first_page(position * size, size, windows.tokens):
            last = position
    return last
