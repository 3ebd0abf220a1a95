"""The rows that llmbatch and its peers answer: two mixes of prompts, each row with the tokens that it generates.

`demo` is the demo dataset: 360 rows with answers of 2 to 256 tokens, most of whose prompts share a passage with seven
others. `answers` is made of the same texts: 200 questions of two tokens each behind five prefixes, 60 chats of 48 to 80
tokens, and 20 answers of 500 to 900 tokens, which are most of the tokens generated. Every prompt is there once. The
seed is fixed, so a mix is always the same.
"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo"
MIXES = ("demo", "answers")
SYSTEM = "You are a helpful assistant. Answer correctly, clearly and in plain English."
INSTRUCTIONS = "Read the passages, then answer the question with the letter of the right option and nothing else."
SEED = 20261123
PREFIXES, SUBJECTS, ASKED = 5, 3, 40  # subjects of a prefix, questions behind it
CHATS, CHAT_TOKENS = 60, range(48, 81, 8)
LONG, LONG_TOKENS = 20, range(500, 901)

Row = tuple[str, int]  # what the user says, and how many tokens are generated


def rows_of(mix: str) -> list[Row]:
    """The rows of a mix by name, or those of a Parquet file with the columns prompt and sampling."""
    if mix == "answers":
        return answers()
    import pyarrow.parquet as pq

    file = DEMO / "data" / "requests.parquet" if mix == "demo" else Path(mix)
    return [(row["prompt"], row["sampling"]["max_tokens"]) for row in pq.read_table(file).to_pylist()]


def answers() -> list[Row]:
    """The mix that long answers dominate, shuffled."""
    draw = random.Random(SEED)
    chats, long, tables = (
        (DEMO / "sources" / name).read_text(encoding="utf-8") for name in ("chat.txt", "long.txt", "subjects.toml")
    )
    subjects = draw.sample(tomllib.loads(tables)["subject"], PREFIXES * SUBJECTS)
    rows = [row for first in range(PREFIXES) for row in questions(draw, subjects[first::PREFIXES])]
    rows += [(chat, draw.choice(CHAT_TOKENS)) for chat in draw.sample(chats.splitlines(), CHATS)]
    rows += [(task, draw.choice(LONG_TOKENS)) for task in draw.sample(long.splitlines(), LONG)]
    draw.shuffle(rows)
    return rows


def questions(draw: random.Random, subjects: list[dict[str, Any]]) -> list[Row]:
    """Questions on some subjects, all behind the passages of these subjects and one solved example of each."""
    asked = [[question(draw, subject, place) for place in range(len(subject["facts"]))] for subject in subjects]
    solved = [f"{text}\nAnswer: {letter}" for (text, letter), *_ in asked]
    head = "\n\n".join([INSTRUCTIONS, *(subject["passage"].strip() for subject in subjects), *solved])
    texts = [text for own in asked for text, _ in own[1:]]
    return [(f"{head}\n\n{text}\nAnswer with the letter only.", 2) for text in draw.sample(texts, ASKED)]


def question(draw: random.Random, subject: dict[str, Any], place: int) -> tuple[str, str]:
    """The question on one fact with its four options in drawn order, and the letter of the right one."""
    key, right = subject["facts"][place]
    wrong = sorted({value for _, value in subject["facts"]} - {right})
    options = [right, *draw.sample(wrong, 3)]
    draw.shuffle(options)
    lines = [f"Question: {subject['question'].format(key)}", *(f"{a}. {text}" for a, text in zip("ABCD", options))]
    return "\n".join(lines), "ABCD"[options.index(right)]
