"""Ranks on the cores of a host, which meet in its memory.

Must not import `engine.gpu`.
Start reading at `engine`.
"""

__all__ = ["engine", "first"]
