"""Takes online requests, called guests, into a stream: how they arrive, where they are written, and how they end.

Must not import anything that steps an engine.
Start reading at `guests`.
"""

__all__ = ["guests", "live_guests", "spare_rows"]
