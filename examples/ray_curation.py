"""Keep the documents of a Parquet folder that a model finds worth keeping, on Ray Data.

    pip install 'llmbatch[ray,structured]'
    python examples/ray_curation.py MODEL DOCUMENTS OUTPUT

MODEL is an instruct model; DOCUMENTS a folder of Parquet files with a column `text`; OUTPUT a folder to be written.
"""

from __future__ import annotations

import sys

import ray
from ray.data.expressions import col

from llmbatch import LLMOperator, map_dataset

ASK = """Is this text clear, complete and free of advertising? Answer yes or no.

{text}"""


def main(model: str, documents: str, output: str) -> None:
    """Ask about each document, keep those with a yes, and write them with the columns they had."""
    found = ray.data.read_parquet(documents)
    judge = LLMOperator(
        model=model,
        template=ASK,
        chat=True,
        structured_outputs={"choice": ["yes", "no"]},  # an answer is one of these, nothing else
    )
    # Equal beginnings go to one actor, and an actor that dies costs what it had in hand.
    judged = map_dataset(found, judge)
    kept = judged.filter(expr=col("generated_text") == "yes").select_columns(found.columns())
    kept.write_parquet(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL DOCUMENTS OUTPUT")
    main(*sys.argv[1:])
