"""Answers tables with one model.

Must not import anything that reads or writes files of a job.
Start reading at `worker`.
"""

__all__ = [
    "error_policy",
    "keywords",
    "options",
    "planners",
    "progress",
    "report",
    "table_worker",
    "window",
    "window_size",
    "worker",
]
