"""Runs batches and keeps their files, as OpenAI's Batches and Files APIs say; both survive a kill of the server.

Must not import `app`, nor anything that reads requests of people.
Start reading at `store`.
"""

__all__ = ["files", "records", "store"]
