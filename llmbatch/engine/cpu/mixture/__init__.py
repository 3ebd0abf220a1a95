"""Runs mixtures of experts on the processor: tokens are grouped by expert, and experts may come from a file.

Must not import the engine.
Start reading at `experts`.
"""

__all__ = ["experts", "packing"]
