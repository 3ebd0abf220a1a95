"""Inner loops of the kernels for the processor, in vector instructions.

Must not import other kernels but `layout`.
Start reading at `dot_tiles`.
"""

__all__ = ["dot_tiles", "endings", "group_tiles", "rotation", "softmax", "vector_ir"]
