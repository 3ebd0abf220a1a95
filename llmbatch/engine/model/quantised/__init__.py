"""Recognises quantised checkpoints, and reads their weights as floats.

Must not import the loader.
Start reading at `quantisation`.
"""

__all__ = ["quantisation", "weight_files"]
