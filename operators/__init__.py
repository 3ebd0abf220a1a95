"""Puts the model into dataframe tools: `LLMOperator` for tables, `ray` for Ray Data.

Must not import `jobs`.
Start reading at `llm`.
"""

__all__ = []
