"""Inner loops of the kernels for the processor, in vector instructions.

Must not import other kernels but `layout`.
Start reading at `dot_tiles`.
"""

__all__ = [
    "dot_tiles",
    "endings",
    "group_tiles",
    "matrix_attention",
    "matrix_tiles",
    "matrix_unit",
    "rotation",
    "softmax",
    "vector_ir",
]
