"""Reads and writes lines of OpenAI's batch files.

Must not import anything that runs requests or knows of jobs.
Start reading at `requests`.
"""

__all__ = ["answers", "build", "fields", "logprobs", "requests", "texts", "validation"]
