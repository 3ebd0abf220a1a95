"""Control tokens in prompts: those that a template writes count, their texts in a row's values are plain text.

A chat is rendered to text before it is tokenised, so a message that holds "<|im_end|>" would end its own turn. A row
with such a text is rendered with its values marked, and the marks show afterwards which control tokens the template
wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

Spans = tuple[tuple[int, int], ...]  # begin and end of each control token in a text; the rest of the text is plain

# Code points that are not characters, and after them those for private use.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0x100000, 0x10FFFE))


class Controls:
    """The texts of a model's control tokens."""

    def __init__(self, texts: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """Compile the texts; `normalize`, if given, is what the tokenizer does to a text before it looks for some."""
        self.texts: tuple[str, ...] = tuple(sorted(filter(None, texts), key=lambda text: (-len(text), text)))
        self._normalize = normalize
        self._any = "|".join(map(re.escape, self.texts)) or "(?!)"  # the longest first, as tokenizers take them
        self._found = re.compile(self._any)
        self._starts = re.compile(f"(?=(?:{self._any})).", re.DOTALL)
        self._tails = {text[:i] for text in self.texts for i in range(1, len(text))}
        self._heads = {text[i:] for text in self.texts for i in range(1, len(text) - 1)}  # one letter alone is common
        self._firsts, self._lasts = {text[0] for text in self.texts}, {text[-1] for text in self.texts}
        self._longest = max(map(len, self.texts), default=0)

    def spans(self, text: str) -> Spans:
        """Find where a tokenizer would see control tokens in a text."""
        return tuple(match.span() for match in self._found.finditer(text))

    def hidden(self, text: str) -> bool:
        """Tell whether a tokenizer would see control tokens that are not written letter by letter in a text."""
        if self._normalize is None:
            return False
        normal = self._normalize(text)
        return len(self._found.findall(normal)) > len(self._found.findall(text))

    def may_arise(self, value: Any) -> bool:
        """Tell whether a value holds a control token, or ends in a piece of one that a neighbour may complete."""
        if isinstance(value, str):
            whole = self._found.search(value) is not None
            return whole or self._tail(value) > 0 or self._head(value) > 0 or self.hidden(value)
        if isinstance(value, dict):
            return any(map(self._found.search, value)) or any(map(self.may_arise, value.values()))
        return isinstance(value, list) and any(map(self.may_arise, value))

    def shield(self, value: Any, mark: str) -> Any:
        """Mark, in a value or in the values it is made of, each control token and each piece of one at an end."""
        if isinstance(value, str):
            return self._shield(value, mark)
        if isinstance(value, dict):
            keys = (self._shield(key, mark) if self._found.search(key) else key for key in value)
            return dict(zip(keys, (self.shield(each, mark) for each in value.values()), strict=True))
        if isinstance(value, list):
            return [self.shield(each, mark) for each in value]
        return value

    def unshield(self, text: str, mark: str) -> tuple[str, Spans]:
        """Remove the marks from a rendered text, and return the control tokens that were not in a value."""
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        end = length = 0
        for match in re.finditer(f"(?:{self._any})(?!{mark})", text):
            before = text[end : match.start()].replace(mark, "")
            length += len(before) + len(match[0])
            spans.append((length - len(match[0]), length))
            pieces += (before, match[0])
            end = match.end()
        return "".join((*pieces, text[end:].replace(mark, ""))), tuple(spans)

    def _shield(self, text: str, mark: str) -> str:
        head, tail = self._head(text), self._tail(text)
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        # Characters after which a mark goes. A control token of one letter is known by the mark that follows it.
        places = {match.start() for match in self._starts.finditer(text)}
        places.update(range(begin, begin + head), range(end - tail, end))
        if not places:
            return text
        return "".join(letter + mark if i in places else letter for i, letter in enumerate(text))

    def _head(self, text: str) -> int:
        """Count the letters at the start of a text that end a control token, ignoring spaces before them."""
        start = text.lstrip()[: self._longest]
        sizes = [size for size, letter in enumerate(start, 1) if letter in self._lasts and start[:size] in self._heads]
        return max(sizes, default=0)

    def _tail(self, text: str) -> int:
        """Count the letters at the end of a text that begin a control token, ignoring spaces after them."""
        end = text.rstrip()[-self._longest :] if self._longest else ""
        sizes = [len(end) - i for i, letter in enumerate(end) if letter in self._firsts and end[i:] in self._tails]
        return max(sizes, default=0)


def strings(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from strings(key)
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def free_mark(value: Any) -> str:
    """Find a code point that no text in a value holds."""
    used = set(map(ord, "".join(strings(value))))
    return chr(next(mark for mark in _MARKS if mark not in used))
