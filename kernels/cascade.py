"""The smallest group of decodes and the shortest prefix that are attended together. Needs no torch."""

from __future__ import annotations

from typing import Final, NamedTuple

GROUP_ROWS: Final = 32  # fewest decodes that attend a shared prefix together
GROUP_TOKENS: Final = 256  # shortest prefix they do it for


class Groups(NamedTuple):
    """Which decodes attend together; a benchmark measures from where on it pays."""

    rows: int = GROUP_ROWS
    tokens: int = GROUP_TOKENS


GROUPS: Final = Groups()
