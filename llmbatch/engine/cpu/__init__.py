"""Runs a model on the processor.

Must not import `engine.gpu`.
Start reading at `engine`.
"""

__all__ = ["attention", "compilation", "engine", "joined_layers", "linear", "platform", "threads"]
