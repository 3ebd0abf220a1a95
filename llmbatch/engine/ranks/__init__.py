"""Splits a model over several processes, which compute each step together: on cores, or a GPU each.

Must not import `engine.devices`, or what is above the engine.
Start reading at `plan`.
"""

__all__ = ["cpu", "gpu", "messages", "orders", "plan", "platforms", "processes", "rank", "reports", "teams"]
