"""Replaces modules and layers of a transformers model by equal ones that pass over memory less often.

Must not import the engines that run them.
Start reading at `modules`.
"""

__all__ = ["layers", "modules", "probes"]
