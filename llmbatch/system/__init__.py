"""Knows this machine: its memory, its processes, where things are kept for it, what was measured of it.

Must not import anything of llmbatch but `errors`.
Start reading at `memory`.
"""

__all__ = [
    "at_once",
    "borrowed_threads",
    "cache",
    "cancel_signal",
    "garbage",
    "matrix_unit",
    "measurements",
    "memory",
    "processes",
    "standard_streams",
    "tuning",
]
