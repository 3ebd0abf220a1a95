"""How many rows a window has, by the memory that it takes.

A window is in memory as its rows, their prompts' tokens, the prefix tree of these and the answers; and several windows
are at a time.
"""

from __future__ import annotations

from llmbatch.errors import ParameterError
from llmbatch.system.memory import available_memory

MOST_ROWS = 100_000  # of a window that nobody asked for: plans of more rows gain no sharing worth their time
HELD = 4  # windows in memory: two in the engine, one that is ready, one in the making
_GROWTH = 4  # bytes of memory for a byte of input: texts, tokens, the prefix tree, answers
_ANSWERS = 4  # copies of an answer: as it was kept and in its row's place, in two windows
_TOKEN_BYTES = 4  # of text, as English has them
_SHARE = 0.25  # of free memory, for all windows together
_STREAMED = 1 << 28  # bytes for all windows of a stream together: who streams asks for little memory, not for speed


def window_rows(asked: int | None, rows: int, nbytes: int, max_tokens: int) -> int:
    """Choose the rows of a window for an input of `rows` rows and `nbytes` bytes, and answers of `max_tokens`.

    Raises ParameterError if as many as were asked for would not fit in memory.
    """
    each = max(1.0, nbytes / max(rows, 1)) * _GROWTH * HELD
    free = available_memory()
    if asked is None:
        return max(1, min(MOST_ROWS, int(_SHARE * free / (each + max_tokens * _TOKEN_BYTES * _ANSWERS))))
    if min(asked, rows) * each > free:
        raise ParameterError(
            f"window_rows must fit in memory, {HELD} windows at a time, but {min(asked, rows):,} rows of this input "
            f"take about {int(min(asked, rows) * each):,} bytes and {free:,} are free: "
            f"at most {max(1, int(free / each)):,} (--window-rows)"
        )
    return asked


def streamed_bytes() -> float:
    """Return how many bytes a window of a stream may take, as `streamed_row_bytes` counts them."""
    return min(_STREAMED, _SHARE * available_memory())


def streamed_row_bytes(nbytes: float, max_tokens: int) -> float:
    """Estimate what a row of `nbytes` bytes takes in all windows that are in memory."""
    return max(1.0, nbytes) * _GROWTH * HELD + max_tokens * _TOKEN_BYTES * _ANSWERS
