"""Runs request traces through planner and scheduler against a clock.

Must not import torch, nor anything that answers tables.
Start reading at `simulator`.
"""

__all__ = ["experiment", "job_split", "options", "search", "splits"]
