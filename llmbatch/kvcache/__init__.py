"""Owns the pages of KV: which are free, which are shared, which stay when nobody uses them.

Must not import torch, nor the scheduler that it serves.
Start reading at `page_pool`.
"""

__all__ = [
    "allocation",
    "contents",
    "eviction",
    "growth",
    "page_pool",
    "page_trie",
    "page_worth",
    "publish",
    "renumber",
    "shared_reads",
    "windows",
]
