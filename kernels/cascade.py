"""Which decodes attend a prefix together: what kernels do, and planning reckons with. Needs no torch."""

from __future__ import annotations

from typing import Final, NamedTuple

GROUP_ROWS: Final = 32  # fewest decodes that attend a shared prefix together
GROUP_TOKENS: Final = 256  # shortest prefix they do it for


class Groups(NamedTuple):
    """Which decodes attend together; the benchmark measures where that begins to pay."""

    rows: int = GROUP_ROWS
    tokens: int = GROUP_TOKENS


GROUPS: Final = Groups()
