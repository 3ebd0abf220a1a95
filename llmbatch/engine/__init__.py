"""Executes the steps that a scheduler decides.

Must not import what plans, nor what drives it.
Start reading at `base`.
"""

__all__ = [
    "base",
    "config",
    "devices",
    "factory",
    "generation",
    "grammars",
    "memory",
    "packing",
    "preparation",
    "recorded",
    "simulated",
]
