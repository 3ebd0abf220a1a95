"""Decides what guests get of a step, and what a job gets beside them.

Must not import `decide`, nor `scheduler`.
Start reading at `guests`.
"""

__all__ = ["decode_choice", "guest_memory", "guest_seconds", "guest_steps", "guests", "held_steps"]
