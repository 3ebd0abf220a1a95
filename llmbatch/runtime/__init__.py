"""Keeps an engine busy: plans, learns lengths, steps, joins windows, and recovers from engines that die.

Must not import anything that knows of tables or files.
Start reading at `shard_run`, then `stream`.
"""

__all__ = [
    "cancellation",
    "protocols",
    "rehearsed_stream",
    "shard_run",
    "stream",
    "warmup",
]
