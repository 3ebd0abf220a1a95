"""Decides which tokens of which sequences the next step computes.

Must not import torch, nor any engine.
Start reading at `decide`.
"""

__all__ = [
    "admission_order",
    "commit",
    "decide",
    "output",
    "scheduler",
    "sequences",
    "state",
    "steering",
    "token_budget",
]
