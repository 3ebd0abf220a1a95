"""Serves a model over HTTP: requests of people first, jobs in what is left.

Must not import the command line.
Start reading at `app`.
"""

__all__ = ["options", "serve"]
