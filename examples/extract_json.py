"""Turn texts into columns: a model fills in a JSON schema, row by row.

    pip install 'llmbatch[structured]'
    python examples/extract_json.py MODEL MAILS OUTPUT

MODEL is an instruct model; MAILS a Parquet or JSONL file with a column `mail`; OUTPUT a Parquet file to be written.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import llmbatch

SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["complaint", "question", "praise"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["product", "kind", "urgency"],
    "additionalProperties": False,
}


def main(model: str, mails: str, output: str) -> None:
    """Extract by a durable job (run it again after a crash), then write what was found as columns."""
    answers = f"{output}.answers"
    llmbatch.run(
        mails,
        answers,
        model=model,
        template="Which product is this mail about, of what kind is it, and how urgent?\n{mail}",
        chat=True,
        structured_outputs={"json": SCHEMA},
        max_tokens=200,
    )
    table = pq.read_table(answers)
    table = table.filter(pc.equal(table["finish_reason"], "stop"))  # the others were cut off
    found = pa.Table.from_pylist([json.loads(answer) for answer in table["generated_text"].to_pylist()])
    pq.write_table(found.add_column(0, "mail", table["mail"]), output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL MAILS OUTPUT")
    main(*sys.argv[1:])
