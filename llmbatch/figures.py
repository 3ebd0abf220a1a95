"""Figures for a person: lines of text, or a table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape


def seconds_in_words(seconds: float) -> str:
    """Say seconds to a tenth, or short ones by two digits.

    >>> [seconds_in_words(seconds) for seconds in (1234.56, 0.0374, 0.0)]
    ['1,234.6', '0.037', '0.0']
    """
    return f"{seconds:,.1f}" if seconds >= 1 or seconds == 0 else f"{seconds:.2g}"


class Figures(ABC):
    """A base of figures that are said in words, each in one place."""

    @abstractmethod
    def _in_words(self) -> list[tuple[str, str]]:
        """Say each figure in words, by its name."""

    def to_text(self) -> str:
        """Return the figures for a person."""
        return "\n".join(f"{name:<16} {words}" for name, words in self._in_words())

    def _repr_html_(self) -> str:
        """Return the figures as the table that a notebook shows."""
        left = 'style="text-align: left"'
        rows = (
            f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(words)}</td></tr>"
            for name, words in self._in_words()
        )
        return f"<table>{''.join(rows)}</table>"
