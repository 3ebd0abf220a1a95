"""Keeps weights that memory does not hold in files or in a host's memory, and brings them to where they are used.

Must not import what runs a model.
Start reading at `residency`.
"""

__all__ = ["block_file", "block_stream", "host_layers", "mapped", "residency", "streamed_cost", "weight_files"]
