"""Pages of answers, named when their tokens are known, so that later prompts find them.

A sequence that ends gives up its pages before its last token is known to the scheduler, which never sees tokens. Its
pages stay, unnamed; nobody finds them. When the engine hands over the answer they get their names. A prompt that
begins with an earlier prompt and its answer, the next turn of a conversation, finds them then. The last page, which is
not full, gets the name of the tokens whose KV it has. The next turn goes on in that page, so it computes nothing again
(`llmbatch.kvcache.growth.find_tail`); of several that could go on there, the first does. The last token of an
answer has no KV, since nothing was computed upon it; nor have the tokens before it that a grammar forced with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.compilation.references import by_reference
from llmbatch.kvcache.contents import find, give_name, name_of, prompt_pages, start, with_token, with_tokens
from llmbatch.kvcache.eviction import free_page
from llmbatch.kvcache.page_pool import PagePool
from llmbatch.kvcache.page_worth import remove


@by_reference
class EndedPages(NamedTuple):
    """The pages of sequences that end from the first with a generated token on."""

    sequences: NDArray[np.int64]  # [n] their numbers
    names: NDArray[np.uint64]  # [n, 2] of the prompt's pages before
    pages: NDArray[np.int32]  # of the i-th: pages[offsets[i]:offsets[i + 1]]
    offsets: NDArray[np.int64]
    computed: NDArray[np.int32]  # [n] tokens whose KV is in pages

    @classmethod
    def of(cls, pages: PagePool, slots: NDArray[np.int32], computed: NDArray[np.int32]) -> EndedPages:
        """Find those of sequences that still hold their pages; none where prompts are not known.

        `computed` int32 [n] are the tokens of each whose KV is in pages.
        """
        if not len(pages.prompts.tokens):
            names, none = np.zeros((0, 2), np.uint64), np.zeros(0, np.int32)
            return cls(np.zeros(0, np.int64), names, none, np.zeros(1, np.int64), none)
        return cls(*_ends(pages, slots), np.ascontiguousarray(computed))


def publish(
    pages: PagePool,
    ends: EndedPages,
    requests: NDArray[np.int32],
    answers: list[NDArray[np.int32]],
    whole: NDArray[np.bool_],
) -> None:
    """Name the pages of answers as far as they are still there; of those that are not `whole`, nothing is kept."""
    if not len(ends.pages):
        return
    lengths = np.array([len(answer) if keep else 0 for answer, keep in zip(answers, whole.tolist(), strict=True)])
    tokens = np.concatenate([np.empty(0, np.int32), *(answer[:n] for answer, n in zip(answers, lengths, strict=True))])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    _publish(pages, ends, np.ascontiguousarray(requests), tokens, offsets)


@compiled
def _ends(
    pages: PagePool, slots: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int32], NDArray[np.int64]]:
    sequences = np.empty(len(slots), np.int64)
    names = np.empty((len(slots), 2), np.uint64)
    offsets = np.zeros(len(slots) + 1, np.int64)
    first = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        slot, request = slots[i], pages.request[slots[i]]
        sequences[i] = pages.sequence[slot]
        tokens = pages.prompts.offsets[request + 1] - pages.prompts.offsets[request] if request >= 0 else 0
        first[i] = min(tokens // pages.page_size, pages.held[slot])
        offsets[i + 1] = offsets[i] + pages.held[slot] - first[i]
        name = start() if first[i] == 0 else name_of(pages.contents, pages.tables[slot, first[i] - 1])
        names[i, 0], names[i, 1] = name
    found = np.empty(offsets[-1], np.int32)
    for i in range(len(slots)):
        for j in range(offsets[i + 1] - offsets[i]):  # slices would have numba compile what their shapes may fail with
            found[offsets[i] + j] = pages.tables[slots[i], first[i] + j]
    return sequences, names, found, offsets


@compiled
def _publish(
    pages: PagePool,
    ends: EndedPages,
    requests: NDArray[np.int32],
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
) -> None:
    prompts, size = pages.prompts, pages.page_size
    for i in range(len(requests)):
        begin = prompts.offsets[requests[i]]
        prompt = prompts.offsets[requests[i] + 1] - begin
        answer = offsets[i + 1] - offsets[i]
        # Nothing of what is not whole is kept; a pipelined engine has computed a token more than there are.
        computed = min(prompt + answer - 1, ends.computed[i]) if answer > 0 else 0
        at = prompt // size * size
        name = (ends.names[i, 0], ends.names[i, 1])
        for page in ends.pages[ends.offsets[i] : ends.offsets[i + 1]]:
            mine = pages.owner[page] == ends.sequences[i]
            named = at < computed
            if named:
                for token in range(at, min(at + size, computed)):
                    name = with_token(
                        name,
                        prompts.tokens[begin + token] if token < prompt else tokens[offsets[i] + token - prompt],
                    )
            at += size
            if mine and not (named and give_name(pages.contents, page, name)):
                remove(pages.worth, page)
                pages.counts[0].unused -= 1
                free_page(pages, page)


@compiled
def found_before(pages: PagePool, request: int, slots: NDArray[np.int32], starts: NDArray[np.int32]) -> int:
    """Count the leading tokens of a prompt before the first page that a chunk of `slots` after `starts` tokens writes.

    Such a page has a name, and is not to be found until it is written.
    """
    name = start()
    begin, whole = prompt_pages(pages.prompts, request, pages.page_size)
    for place in range(whole):
        at = begin + place * pages.page_size
        name = with_tokens(name, pages.prompts.tokens, at, at + pages.page_size)
        page = find(pages.contents, name[0], name[1])
        for i in range(len(slots)):
            writes = starts[i] // pages.page_size <= place < pages.held[slots[i]]
            if writes and pages.tables[slots[i], place] == page:
                return int(place * pages.page_size)
    return int(whole * pages.page_size + pages.page_size)


@compiled
def tokens_found(pages: PagePool, request: int) -> int:
    """Count the leading tokens of a prompt that `allocation.adopt` would find by their names.

    None where layers have windows: which of them are found depends on what else is there.
    """
    if pages.windows.tokens > 0:
        return 0
    name = start()
    begin, whole = prompt_pages(pages.prompts, request, pages.page_size)
    tokens = pages.prompts.offsets[request + 1] - pages.prompts.offsets[request]
    most = (min(tokens, pages.prompts.findable[request]) - 1) // pages.page_size
    for place in range(min(whole, most)):
        at = begin + place * pages.page_size
        name = with_tokens(name, pages.prompts.tokens, at, at + pages.page_size)
        if find(pages.contents, name[0], name[1]) < 0:
            return int(place * pages.page_size)
    return int(min(whole, most) * pages.page_size)
