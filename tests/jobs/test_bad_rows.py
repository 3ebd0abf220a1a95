"""Rows that cannot be answered, of every kind: they say why, and leave all others the answers they have."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.jobs import Job
from tests.support.models import tiny_model_folder
from tests.support.tokenizers import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=CHAT_TEMPLATE)


def questions(count: int) -> list[str]:
    return [f"{'What is the sum of' if i % 3 else 'Tell me about'} {i} and {i % 7}?" for i in range(count)]


def message(role: str, content: str) -> str:
    return json.dumps([{"role": role, "content": content}])


LONG = "x" * 600  # of a model with room for 512 tokens
PLAIN = questions(200)
CHATS = [message("user", text) for text in questions(200)]

# For each way to make prompts: the good ones, and the bad ones of each kind that 2 % of the rows get.
Kinds = dict[str, dict[str, list[str | None]]]
WAYS: list[tuple[dict[str, str], list[str], Kinds]] = [
    (
        {"prompt": "text"},
        PLAIN,
        {"null_prompt": {"text": [None, ""]}, "too_long": {"text": [LONG]}, "parameters": {"params": ["{", "[]"]}},
    ),
    (
        {"template": "Q: {text} ({name})"},
        PLAIN,
        {"template": {"text": [None], "name": [None]}, "too_long": {"name": [LONG]}},
    ),
    (
        {"messages": "text"},
        CHATS,
        {
            "null_prompt": {"text": [None]},
            "messages": {"text": ["no JSON", "[]", message("user", "\ud800"), '[{"role": "user"}]']},
            "too_long": {"text": [message("user", LONG)]},
            "parameters": {"params": ['{"max_tokens": 0}', '{"max_token": 3}', '{"temperature": -1}']},
        },
    ),
]


@pytest.mark.parametrize(("source", "texts", "kinds"), WAYS)
def test_bad_rows_of_every_kind_leave_all_others_the_answers_they_have(
    job: Job, source: dict[str, str], texts: list[str], kinds: Kinds
) -> None:
    job = job.having(prompt=None, engine=None, output_tokens=None, max_tokens=5, window_rows=75, max_running=None)
    job = job.having(**source, sampling_params="params")
    rng = np.random.default_rng(0)
    columns: dict[str, list[str | None]] = {
        "id": [str(i) for i in range(len(texts))],
        "text": list(texts),
        "name": ["Ada"] * len(texts),
        "params": [None] * len(texts),
    }
    left = rng.permutation(len(texts)).tolist()
    wrong: dict[str, str] = {}
    for kind, places in kinds.items():
        bad = [(column, value) for column, values in places.items() for value in values]
        for i in range(max(len(bad), len(texts) // 50)):
            row = left.pop()
            column, value = bad[i % len(bad)]
            columns[column][row] = value
            wrong[str(row)] = kind
    table = pa.table(columns, schema=pa.schema([(name, pa.string()) for name in columns]))
    good = pa.array([name not in wrong for name in columns["id"]])
    job.write(table)
    report = job.run()
    answers = job.answers()
    errors = answers.filter(pc.is_valid(answers["error"]))
    assert dict(zip(errors["id"].to_pylist(), errors["error_kind"].to_pylist())) == wrong
    assert report.errors == len(wrong)
    job.write(table.filter(good))
    alone = job.to("alone")
    alone.run()
    assert answers.filter(good).equals(alone.answers())
