"""Attends over pages, and computes what lies between a layer's products: `cpu` by numba, `triton` on a GPU.

Must not import anything of llmbatch but `compilation` and `errors`.
Start reading at `interface`.
"""

__all__ = ["cascade", "chunks", "flash_attn", "interface", "reference", "spec", "torch_varlen", "work_items"]
