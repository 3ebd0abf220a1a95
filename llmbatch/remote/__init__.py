"""Answers a job's rows at an endpoint, in place of an engine of the job's own.

Must not import torch, nor anything that makes engines.
Start reading at `worker`.
"""

__all__: list[str] = []
