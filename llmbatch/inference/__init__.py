"""Answers tables with one model.

Must not import anything that reads or writes files of a job.
Start reading at `worker`.
"""

__all__ = [
    "answer_columns",
    "answer_schema",
    "answers",
    "error_policy",
    "options",
    "progress",
    "report",
    "row_parts",
    "shared_worker",
    "table_worker",
    "window",
    "window_size",
    "worker",
]
