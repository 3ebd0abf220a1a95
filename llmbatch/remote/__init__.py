"""Answers a job's rows at endpoints, in place of an engine of the job's own.

Must not import torch, nor make an engine where a URL is given.
Start reading at `worker`.
"""

__all__ = ["opening"]
