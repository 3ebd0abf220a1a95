"""Runs the command line: arguments in, exit status out.

Must not import NumPy, pyarrow or torch before a command needs them.
Start reading at `main`.
"""

__all__ = ["main"]
