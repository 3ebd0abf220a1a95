"""Turns finished requests into answers: columns of the rows that asked for them.

Must not import anything that runs a model.
Start reading at `assembler`.
"""

__all__ = ["assembler", "columns", "row_parts", "schema"]
