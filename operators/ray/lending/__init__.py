"""Lends rows from an engine that would end last to one that has none left.

Must not import what reads or cuts a dataset.
Start reading at `exchange`.
"""

__all__ = ["borrowed", "exchange", "loan_client", "loans", "place"]
