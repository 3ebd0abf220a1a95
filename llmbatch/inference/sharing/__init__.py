"""Shares one engine among several callers: the guests of an endpoint, and jobs.

Must not import anything that speaks HTTP.
Start reading at `shared_worker`.
"""

__all__ = ["shared_worker"]
