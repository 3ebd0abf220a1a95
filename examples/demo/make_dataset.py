"""Make the demo dataset: 360 requests of three kinds, shuffled, from the tables under `sources/`.

    python examples/demo/make_dataset.py [--output examples/demo/data/requests.parquet]

- `choice`, 192 rows: 24 subjects of 8 questions. The questions of a subject share instructions, a passage
  and five solved examples; then come a sixth example drawn for the row, and the question. The answer is
  a letter.
- `chat`, 114 rows: short questions, and passages to sum up, each with a prompt of its own.
- `long`, 54 rows: stories, essays and guides that run as long as they may.

The same seed gives the same file. Columns: id string, kind string, prompt string, answer string (the right
letter; null where there is none), sampling struct<max_tokens: int32>.
"""

from __future__ import annotations

import argparse
import random
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
SEED = 20260401
LETTERS = "ABCD"
SHOTS = 5
QUESTIONS = 8
CHOICE_TOKENS = 2
CHAT_TOKENS = range(48, 81, 8)
LONG_TOKENS = range(160, 257, 16)

INSTRUCTIONS = (
    "You are taking a test of general knowledge. Each question has four options, marked A, B, C and D, and "
    "exactly one of them is right. Read the passage, look at the solved examples, and then answer the last "
    "question with the letter of the right option and nothing else."
)
SUMMARY = "Say in one or two sentences what this passage is about.\n\n"
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("sampling", pa.struct([pa.field("max_tokens", pa.int32())]), nullable=False),
    ]
)


def question(draw: random.Random, text: str, right: str, others: list[str]) -> tuple[str, str]:
    """The question with its four options in drawn order, and the letter of the right one."""
    options = [right, *draw.sample(others, len(LETTERS) - 1)]
    draw.shuffle(options)
    lines = [f"Question: {text}", *(f"{letter}. {option}" for letter, option in zip(LETTERS, options))]
    return "\n".join(lines), LETTERS[options.index(right)]


def choice_rows(draw: random.Random, subject: dict[str, Any]) -> list[dict[str, Any]]:
    """The questions of one subject: its first facts solved as shared examples, the next ones asked."""
    facts: list[list[str]] = draw.sample(subject["facts"], len(subject["facts"]))
    values = [value for _, value in facts]
    solved = [
        question(draw, subject["question"].format(key), right, [value for value in values if value != right])
        for key, right in facts
    ]
    examples = [f"{text}\nAnswer: {letter}" for text, letter in solved]
    head = [INSTRUCTIONS, f"Subject: {subject['name']}.", subject["passage"].strip(), *examples[:SHOTS]]
    rows = []
    for asked in range(SHOTS, SHOTS + QUESTIONS):
        own = draw.choice([example for place, example in enumerate(examples) if place >= SHOTS and place != asked])
        text, letter = solved[asked]
        rows.append(
            {
                "kind": "choice",
                "prompt": "\n\n".join([*head, own, f"{text}\nAnswer with the letter only."]),
                "answer": letter,
                "sampling": {"max_tokens": CHOICE_TOKENS},
            }
        )
    return rows


def open_rows(draw: random.Random, kind: str, prompts: list[str], lengths: range) -> list[dict[str, Any]]:
    """A row for each prompt, with a drawn limit on its answer."""
    return [
        {"kind": kind, "prompt": prompt, "answer": None, "sampling": {"max_tokens": draw.choice(lengths)}}
        for prompt in prompts
    ]


def dataset(seed: int = SEED) -> pa.Table:
    """All rows, shuffled by the seed and numbered in their new order."""
    draw = random.Random(seed)
    chat, long, tables = (
        (HERE / "sources" / name).read_text(encoding="utf-8") for name in ("chat.txt", "long.txt", "subjects.toml")
    )
    subjects = tomllib.loads(tables)["subject"]
    rows = [row for subject in subjects for row in choice_rows(draw, subject)]
    rows += open_rows(draw, "chat", chat.splitlines(), CHAT_TOKENS)
    rows += open_rows(draw, "chat", [SUMMARY + subject["passage"].strip() for subject in subjects], CHAT_TOKENS)
    rows += open_rows(draw, "long", long.splitlines(), LONG_TOKENS)
    draw.shuffle(rows)
    return pa.Table.from_pylist([{"id": f"r{number:03d}", **row} for number, row in enumerate(rows)], schema=SCHEMA)


def main() -> None:
    """Write the dataset as one Parquet file."""
    parser = argparse.ArgumentParser(description="Make the demo dataset.")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "requests.parquet")
    output: Path = parser.parse_args().output
    table = dataset()
    output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, output, compression="zstd")
    print(f"{table.num_rows} rows in {output}")


if __name__ == "__main__":
    main()
