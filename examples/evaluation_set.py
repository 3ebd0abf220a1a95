"""Make an evaluation set of a folder of texts: a model writes multiple-choice questions, and the same one is scored.

    pip install 'llmbatch[structured]'
    python examples/evaluation_set.py MODEL PASSAGES OUTPUT

MODEL is an instruct model; PASSAGES a Parquet file with a column `passage`; OUTPUT a JSONL file to be written, one
question a line with `question`, `choices` (the first is right) and `log_likelihoods` of the choices. The model
answers without the passage: what it then gets right it knew.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch import LLMOperator

TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {
        "question": TEXT,
        "right": TEXT,
        "wrong": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 3},
    },
    "required": ["question", "right", "wrong"],
    "additionalProperties": False,
}
WRITE = "Write a question about this passage, with its right answer and three wrong ones.\n\n{passage}"


def write(model: str, passages: pa.Table) -> pa.Table:
    """Write a question for each passage; those that were cut off are left out."""
    author = LLMOperator(model=model, template=WRITE, chat=True, structured_outputs={"json": SCHEMA}, max_tokens=600)
    answers = [row["generated_text"] for row in author(passages).to_pylist() if row["finish_reason"] == "stop"]
    made = [json.loads(answer) for answer in answers]
    questions = pa.array([one["question"] for one in made], pa.string())
    choices = pa.array([[one["right"], *one["wrong"]] for one in made], pa.list_(pa.string()))
    return pa.table({"question": questions, "choices": choices})


def score(model: str, questions: pa.Table) -> pa.Table:
    """Score each choice behind its question; all four share the computation of the question."""
    scorer = LLMOperator(model=model, template="Question: {question}\nAnswer: ", continuation="choices")
    scores = scorer(questions)["continuation_logprob"]
    return questions.append_column("log_likelihoods", scores)


def main(model: str, passages: str, output: str) -> None:
    """Write the set and say how much of it the model knew."""
    scored = score(model, write(model, pq.read_table(passages, columns=["passage"]))).to_pylist()
    with open(output, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in scored)
    known = sum(row["log_likelihoods"][0] == max(row["log_likelihoods"]) for row in scored)
    print(f"{len(scored)} questions, {known} of them answered rightly without the passage")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(f"usage: python {sys.argv[0]} MODEL PASSAGES OUTPUT")
    main(*sys.argv[1:])
