"""Ranks on the GPUs of a host, a process each, which add up by torch.distributed.

Must not import `engine.cpu`.
Start reading at `engine`.
"""

__all__ = ["engine", "first"]
