"""What an unused page is worth by the plan, and how a slot finds the pages that were kept for it."""

from __future__ import annotations

from typing import Any

from llmbatch.compiled import njit
from llmbatch.contents import find, name_of, prompt_pages, start, with_tokens
from llmbatch.trie import fill_path
from llmbatch.worth import given_up, planned, revalue


@njit(cache=True)
def path_of(pages: Any, request: int) -> Any:
    """Numbers of the shareable pages of a request, first page first; valid until the next call."""
    depth = pages.depth[request]
    path = pages.path[:depth]
    if depth > 0:
        fill_path(path, depth, pages.run[request], pages.run_start, pages.run_base, pages.run_parent)
    return path


@njit(cache=True)
def expect_requests(pages: Any, request: int, more: int) -> None:
    """So many more requests are to come for each page of a request's path."""
    for node in path_of(pages, request):
        pages.remaining[node] += more
        page = pages.resident[node]
        if page >= 0 and pages.users[page] == 0:
            revalue(pages.worth, page, worth_in_plan(pages, page))


@njit(cache=True)
def worth_in_plan(pages: Any, page: int) -> Any:
    """The worth of an unused page by the requests to come: of one of the trie that has any, else as given up now."""
    number = pages.node[page]
    if number >= 0 and pages.remaining[number] > 0:
        return planned(pages.remaining[number], number)
    return given_up(pages.worth, 0)


@njit(cache=True)
def recall(pages: Any, slot: int, position: int) -> Any:
    """The next page of a slot, if it was its own before or is known by what it holds; else -1."""
    page = pages.tables[slot, position]
    if page >= 0 and pages.owner[page] == pages.sequence[slot]:
        return page
    begin, named = prompt_pages(pages.prompts, pages.request[slot], pages.page_size)
    if position >= named:
        return -1
    name = start() if position == 0 else name_of(pages.contents, pages.tables[slot, position - 1])
    begin += position * pages.page_size
    name = with_tokens(name, pages.prompts.tokens, begin, begin + pages.page_size)
    page = find(pages.contents, name[0], name[1])
    return page if page >= 0 and pages.node[page] < 0 else -1
