"""Renders the scheduling policies of papers, step by step against a clock.

Must not import the library's own scheduler.
Start reading at `run_state`, then at `fcfs`, the shortest policy.
"""

__all__ = ["bros", "clock", "fcfs", "ooco", "pools", "priority", "roofline", "round_robin", "run_state"]
