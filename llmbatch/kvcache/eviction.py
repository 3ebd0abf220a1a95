"""What an unused page is worth by the plan, who finds it, and how it goes when its room is needed."""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.kvcache.contents import find, forget_contents, name_of, prompt_pages, start, with_tokens
from llmbatch.kvcache.page_pool import FREE, NOBODY, PagePool, path_of
from llmbatch.kvcache.page_worth import given_up, planned, remove, revalue
from llmbatch.kvcache.windows import drop_window_page, tail_begin, value_window_page, want


@compiled
def expect_requests(pages: PagePool, request: int, more: int) -> None:
    """Change by `more` how many requests are to come for each page of a request's path."""
    path = path_of(pages, request)
    for node in path:
        pages.remaining[node] += more
        page = pages.resident[node]
        if page >= 0 and pages.users[page] == 0:
            revalue(pages.worth, page, worth_in_plan(pages, page))
    if pages.windows.tokens > 0:
        for node in path[tail_begin(len(path), pages.page_size, pages.windows.tokens) :]:
            want(pages.windows, node, pages.resident[node], more)


@compiled
def worth_in_plan(pages: PagePool, page: int) -> int:
    """Value an unused page by the requests to come; one that none of them finds by its trie, as given up now."""
    number = pages.node[page]
    if number >= 0 and pages.remaining[number] > 0:
        return planned(pages.remaining[number], number)
    return given_up(pages.worth, 0)


@compiled
def recall(pages: PagePool, slot: int, position: int) -> int:
    """Find the next page of a slot, if it was its own before or is known by what it holds; else -1."""
    page: int = pages.tables[slot, position]
    if page >= 0 and pages.owner[page] == pages.sequence[slot]:
        return page
    begin, named = prompt_pages(pages.prompts, pages.request[slot], pages.page_size)
    if position >= named:
        return -1
    name = start() if position == 0 else name_of(pages.contents, pages.tables[slot, position - 1])
    begin += position * pages.page_size
    name = with_tokens(name, pages.prompts.tokens, begin, begin + pages.page_size)
    return find(pages.contents, name[0], name[1])


@compiled
def publish_as(pages: PagePool, page: int, node: int) -> None:
    """Let a loose page stand for one of the trie; the caller sees to its users and its worth."""
    pages.node[page] = node
    pages.owner[page] = NOBODY
    pages.resident[node] = page
    if pages.windows.tokens > 0:
        value_window_page(pages.windows, page, node)


@compiled
def give_up(pages: PagePool, slot: int, request: int) -> None:
    """Give up what was kept for a slot's preempted request, which does not come back."""
    expect_requests(pages, request, -1)
    for page in pages.tables[slot]:
        if page >= 0 and pages.owner[page] == pages.sequence[slot]:
            remove(pages.worth, page)
            pages.counts[0].unused -= 1
            free_page(pages, page)
    pages.sequence[slot] = NOBODY


@compiled
def free_page(pages: PagePool, page: int) -> None:
    """Free a page that nobody holds and nobody will find."""
    if pages.node[page] >= 0:
        pages.resident[pages.node[page]] = -1
    if pages.windows.tokens > 0:
        drop_window_page(pages.windows, page)
    forget_contents(pages.contents, page)
    pages.owner[page] = NOBODY
    pages.node[page] = FREE
    pages.free[pages.counts[0].free] = page
    pages.counts[0].free += 1


@compiled
def evict(pages: PagePool, wanted: int) -> None:
    """Free the least worthy of the pages that nobody uses."""
    assert pages.counts[0].unused >= wanted, "room was promised that is not there"
    for _ in range(wanted):
        page = pages.worth.heap[0]
        remove(pages.worth, page)
        pages.counts[0].unused -= 1
        free_page(pages, page)
