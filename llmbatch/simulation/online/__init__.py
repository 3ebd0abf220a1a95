"""Runs online requests beside a job against a clock, under the policies of papers and ours.

Must not import torch, nor anything that answers tables.
Start reading at `run_state`, then at `fcfs`, the shortest policy.
"""

__all__ = ["experiment", "options"]
