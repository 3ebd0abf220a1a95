"""Keeps files on any store: written whole, locked, journalled, tried again where that may help.

Must not import anything of llmbatch but `system` and `errors`.
Start reading at `location`.
"""

__all__ = ["journal", "local", "location", "lock", "retries"]
