"""Makes a model ready: its weights and engines, its vocabulary for grammars, and compiled kernels.

Must not import anything that answers tables.
Start reading at `engines`.
"""

__all__ = ["base", "engines", "kernel_compilation"]
