"""Reads files as Arrow tables: finds them, agrees on one schema, and reads a window of rows at a time.

Must not import `io.writing`.
Start reading at `dataset`.
"""

__all__ = ["dataset", "discovery", "json_block", "jsonl"]
