"""Runs online requests beside a job against a clock, under the policies of papers and the library's own.

Must not import torch, nor anything that answers tables.
Start reading at `experiment`, then at `papers` for the policies of others.
"""

__all__ = ["experiment", "options"]
