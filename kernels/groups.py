"""Which decodes attend a prefix together: what kernels do, and planning reckons with. Imports nothing."""

from __future__ import annotations

from typing import Final

GROUP_ROWS: Final = 32  # fewest decodes that attend a shared prefix together
GROUP_TOKENS: Final = 256  # shortest prefix they do it for
