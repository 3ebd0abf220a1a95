"""Runs the command line: arguments in, exit status out.

Must not import anything before a command needs it.
Start reading at `main`.
"""

__all__ = ["main"]
