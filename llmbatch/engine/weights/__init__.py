"""Keeps weights that memory does not hold in files, and brings them to memory in time.

Must not import what runs a model.
Start reading at `residency`.
"""

__all__ = ["block_file", "block_stream", "mapped", "residency"]
