"""Reads datasets and writes them: `reading` takes Parquet and JSON lines in, `writing` puts whole outputs out.

Must not import torch, nor anything that runs rows.
Start reading at `reading.dataset` and `writing.output`.
"""

__all__ = ["gather", "row_hash", "sealed_json"]
