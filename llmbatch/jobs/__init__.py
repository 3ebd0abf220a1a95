"""Runs durable jobs: a dataset in, a dataset out, resumed where it was killed.

Must not import Ray, nor any operator.
Start reading at `job`.
"""

__all__ = ["explain", "forecast", "job", "options"]
