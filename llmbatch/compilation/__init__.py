"""Compiles Python by numba, keeps the code, and runs it as Python until it is compiled.

Must not import anything of llmbatch but `system` and `errors`.
Start reading at `decorators`.
"""

__all__ = ["calls", "decorators", "interpreted", "records", "references"]
