"""Writes tables to files that appear whole or not at all.

Imports `io.reading` to read a finished output again, and nothing that runs rows.
Start reading at `output`.
"""

__all__ = ["formats", "output", "parts", "work_files"]
