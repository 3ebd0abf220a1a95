"""Splits a model over several processes, which compute each step together.

Must not import `engine.factory`, `engine.gpu`, or what is above the engine.
Start reading at `engine`.
"""

__all__ = ["collectives", "first", "messages", "plan", "shares"]
