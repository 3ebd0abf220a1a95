"""Answer the rows of an Arrow table.

    python examples/operator_arrow.py MODEL

MODEL is a folder, a .gguf file or a hub name of an instruct model.
"""

from __future__ import annotations

import sys

import pyarrow as pa

from llmbatch import LLMOperator


def main(model: str) -> None:
    """Answer three questions and print the table's new columns."""
    table = pa.table({"country": ["France", "Japan", "Kenya"]})
    answer = LLMOperator(model=model, template="What is the capital of {country}?", chat=True, max_tokens=24)
    for row in answer(table).to_pylist():
        print(f"{row['country']}: {row['generated_text']} ({row['finish_reason']})")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL")
    main(sys.argv[1])
