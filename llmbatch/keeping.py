"""Whether a page that nobody uses is kept, what it is worth by the plan, and by what name it is found."""

from __future__ import annotations

from typing import Any

from llmbatch.compiled import njit
from llmbatch.contents import find, index, is_named, name_of, start, with_tokens
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
def worth_when_released(pages: Any, page: int, again: bool) -> Any:
    """The worth of a page that is given up; of one that is loose, `again` is the only one who is known to come."""
    return given_up(pages.worth, 1) if again and pages.node[page] < 0 else worth_in_plan(pages, page)


@njit(cache=True)
def is_kept(pages: Any, page: int, again: bool) -> Any:
    """Whether a page that nobody uses may be found: by the trie, by what it holds, or by its sequence."""
    number = pages.node[page]
    if number >= 0 and pages.remaining[number] > 0:
        return True
    if number < 0 and again:
        return True
    if len(pages.prompts.tokens) == 0:
        return False
    # What has no name has generated tokens, and is named when they are known (`llmbatch.publishing`).
    return index(pages.contents, page) or not is_named(pages.contents, page)


@njit(cache=True)
def in_prompt(pages: Any, slot: int, position: int) -> Any:
    """Whether a page of a slot is one of known prompt tokens alone."""
    if len(pages.prompts.tokens) == 0:
        return False
    request = pages.request[slot]
    tokens = pages.prompts.offsets[request + 1] - pages.prompts.offsets[request]
    return (position + 1) * pages.page_size <= tokens


@njit(cache=True)
def prompt_name(pages: Any, slot: int, position: int) -> Any:
    """The name of a page of prompt tokens; the slot holds those before."""
    name = start() if position == 0 else name_of(pages.contents, pages.tables[slot, position - 1])
    begin = pages.prompts.offsets[pages.request[slot]] + position * pages.page_size
    return with_tokens(name, pages.prompts.tokens, begin, begin + pages.page_size)


@njit(cache=True)
def recall(pages: Any, slot: int, position: int) -> Any:
    """The next page of a slot, if it was its own before or is known by what it holds; else -1."""
    page = pages.tables[slot, position]
    if page >= 0 and pages.owner[page] == pages.sequence[slot]:
        return page
    if not in_prompt(pages, slot, position):
        return -1
    name = prompt_name(pages, slot, position)
    page = find(pages.contents, name[0], name[1])
    return page if page >= 0 and pages.node[page] < 0 else -1
