"""Summarise the long reviews of a Parquet file in a lazy Polars query, larger than memory if need be.

    pip install 'llmbatch[polars]'
    python examples/polars_pipeline.py MODEL REVIEWS OUTPUT

MODEL is an instruct model; REVIEWS a Parquet file with columns `product` and `review`; OUTPUT a Parquet file.
"""

from __future__ import annotations

import sys
from typing import Any

import polars as pl

import llmbatch


def main(model: str, reviews: str, output: str) -> None:
    """Filter, ask, filter, and write, a window of rows at a time."""
    summarise = llmbatch.LLMOperator(
        model=model, template="Sum up this review of {product} in one sentence:\n{review}", chat=True, max_tokens=60
    )
    rows: Any = pl.scan_parquet(reviews).filter(pl.col("review").str.len_chars() > 80)  # before the model
    query = (
        rows.llm.generate(summarise)
        .filter(pl.col("finish_reason") == "stop")  # after it: whole sentences only
        .select("product", summary=pl.col("generated_text").str.strip_chars())
    )
    query.sink_parquet(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL REVIEWS OUTPUT")
    main(*sys.argv[1:])
