"""Finds, describes, loads and rewrites a transformers model so that it runs over pages.

Must not import the engines that run it.
Start reading at `loader`.
"""

__all__ = ["checkpoints", "config", "fusion", "loader", "number_type", "ops", "outline", "platform", "refusals"]
