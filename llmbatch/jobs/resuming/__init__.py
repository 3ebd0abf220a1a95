"""Finds what an earlier run of a job has left, and which rows it is of.

Must not import what answers rows.
Start reading at `resume`.
"""

__all__ = ["begun_tokens", "fingerprint", "prior_answers", "resume", "row_keys"]
