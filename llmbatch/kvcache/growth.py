"""How the sequences that run get more pages: for their prompts, and for what they generate.

The caller makes sure of room first: pages that are free, and unused ones, which are evicted for it
(`llmbatch.kvcache.page_pool.room_for`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.contents import (
    find,
    forget_contents,
    give_name,
    name_of,
    prompt_pages,
    start,
    with_token,
    with_tokens,
)
from llmbatch.kvcache.eviction import evict, free_page
from llmbatch.kvcache.page_pool import LOOSE, NOBODY, PagePool, path_of
from llmbatch.kvcache.page_worth import remove
from llmbatch.kvcache.windows import drop_window_page, enter_window


@compiled
def extend(pages: PagePool, slot: int, tokens: int) -> None:
    """Hold pages for the first `tokens` tokens of a slot; pages on its path are published.

    The caller has made sure of room, and that tables are wide enough.
    """
    wanted = -(-tokens // pages.page_size)
    missing = wanted - pages.held[slot]
    if missing <= 0:
        return
    if missing > pages.counts[0].free:
        evict(pages, missing - pages.counts[0].free)
    path = path_of(pages, pages.request[slot])
    while pages.held[slot] < wanted:
        position = pages.held[slot]
        _let_find(pages, slot, position, take_page(pages, slot), path)
    pages.counts[0].widest = max(pages.counts[0].widest, wanted)


@compiled
def find_tail(pages: PagePool, slot: int, target: int) -> tuple[int, int]:
    """Find a page that holds what comes after a slot's full pages, as far as an earlier answer went.

    Returns the page that holds most of it, and how many tokens; -1 and 0 where none holds any. The last of `target`
    tokens is never found, as in `adopt`. Where layers have windows none is found: `release` keeps none.
    """
    prompts, request, found, tokens = pages.prompts, pages.request[slot], -1, 0
    if len(prompts.tokens) == 0 or pages.windows.tokens > 0:
        return found, tokens
    begin, offset = pages.held[slot] * pages.page_size, prompts.offsets[request]
    end = min(target - 1, begin + pages.page_size - 1)
    end = min(end, prompts.offsets[request + 1] - offset, prompts.findable[request] - 1)
    if begin >= end:
        return found, tokens
    name = start() if begin == 0 else name_of(pages.contents, pages.tables[slot, pages.held[slot] - 1])
    for at in range(begin, end):
        name = with_token(name, prompts.tokens[offset + at])
        page = find(pages.contents, name[0], name[1])
        if page >= 0 and pages.users[page] == 0:
            found, tokens = page, at + 1 - begin
    return found, tokens


@compiled
def take_tail(pages: PagePool, slot: int, page: int) -> None:
    """Let a slot go on in a page that `find_tail` found. Nobody finds it any more as what it was."""
    position = pages.held[slot]
    remove(pages.worth, page)
    pages.counts[0].unused -= 1
    forget_contents(pages.contents, page)
    pages.owner[page] = NOBODY
    pages.users[page] = 1
    pages.tables[slot, position] = page
    pages.held[slot] += 1
    pages.counts[0].widest = max(pages.counts[0].widest, pages.held[slot])
    _let_find(pages, slot, position, page, path_of(pages, pages.request[slot]))


@compiled
def _let_find(pages: PagePool, slot: int, position: int, page: int, path: NDArray[np.int32]) -> None:
    """Publish a loose page that a slot fills in this step, and name it, as far as it is one of the prompt."""
    # A page of the path that another slot holds already cannot be published twice: this copy is loose. If it has lost
    # its window, nobody finds it, and this one stands in its place.
    if pages.windows.tokens > 0 and position < len(path) and pages.resident[path[position]] >= 0:
        _supersede(pages, pages.resident[path[position]])
    if position < len(path) and pages.resident[path[position]] < 0:
        pages.node[page] = path[position]
        pages.resident[path[position]] = page
        pages.counts[0].shared += 1
    begin, named = prompt_pages(pages.prompts, pages.request[slot], pages.page_size)
    if position < named:
        contents = pages.contents
        name = start() if position == 0 else name_of(contents, pages.tables[slot, position - 1])
        at = begin + position * pages.page_size
        give_name(contents, page, with_tokens(name, pages.prompts.tokens, at, at + pages.page_size))


@compiled
def extend_by_one(pages: PagePool, slot: int) -> None:
    """Hold one page more, which is loose."""
    if pages.counts[0].free == 0:
        evict(pages, 1)
    take_page(pages, slot)
    pages.counts[0].widest = max(pages.counts[0].widest, pages.held[slot])


@compiled
def take_page(pages: PagePool, slot: int) -> int:
    """Append a free page to a slot's table, as a loose one."""
    pages.counts[0].free -= 1
    page: int = pages.free[pages.counts[0].free]
    pages.node[page] = LOOSE
    pages.users[page] = 1
    pages.tables[slot, pages.held[slot]] = page
    if pages.windows.tokens > 0:
        enter_window(pages.windows, slot, pages.held[slot], page)
    pages.held[slot] += 1
    return page


@compiled
def _supersede(pages: PagePool, page: int) -> None:
    """Let a page of the trie stand for it no more: it goes, or is its users' business."""
    if pages.users[page] == 0:
        remove(pages.worth, page)
        pages.counts[0].unused -= 1
        free_page(pages, page)
    else:
        pages.resident[pages.node[page]] = -1
        pages.node[page] = LOOSE
        pages.counts[0].shared -= 1
        drop_window_page(pages.windows, page)
