"""The model for lm-evaluation-harness, against the harness's own `hf` model on the same requests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT

pytest.importorskip("lm_eval", reason="needs the harness: pip install 'llmbatch[lm-eval]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the harness and what it imports warn of themselves
]

WORDS = "amber birch cedar delta ember fjord grove heath islet junco knoll larch maple north ocean pearl".split()
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}} "
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
num_fewshot: 2
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
num_fewshot: 1
generation_kwargs: {until: ["e", "z"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four tasks over a file of 12 documents; one text is longer than the model's context."""
    place = tmp_path_factory.mktemp("tasks")
    random = np.random.default_rng(0)
    with open(place / "docs.jsonl", "w") as file:
        for i in range(12):
            words = random.choice(WORDS, 6).tolist()
            doc = {
                "question": f"after {words[0]} and {words[1]} comes",
                "choices": words[2:],
                "label": i % 4,
                "answer": " " + words[2],
                "text": " ".join(random.choice(WORDS, 60 if i == 3 else 5)),
            }
            file.write(json.dumps(doc) + "\n")
    for name, task in TASKS.items():
        head = COMMON.format(name=name, data=place / "docs.jsonl", cache=place / "cache")
        (place / f"{name}.yaml").write_text(head + task)
    return place


def evaluate(model: str, folder: str, tasks: Path, **options: Any) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": folder, "dtype": "float32", "max_length": 128, **options.pop("model_args", {})},
        device="cpu",
        tasks=list(options.pop("names", TASKS)),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )


def scores(result: Any) -> dict[str, dict[str, float]]:
    """Every metric of every task."""
    return {
        task: {name: value for name, value in found.items() if isinstance(value, float)}
        for task, found in result["results"].items()
    }


def answers(result: Any, task: str) -> list[Any]:
    """What each request of a task was answered, in the order of documents."""
    samples = sorted(result["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [answer for sample in samples for answer in sample["resps"]]


@pytest.fixture(scope="module")
def ours(folder: str, tasks: Path) -> Any:
    return evaluate("llmbatch", folder, tasks)


@pytest.fixture(scope="module")
def theirs(folder: str, tasks: Path) -> Any:
    # In float32 a sum of many log-probabilities is off by more than 1e-5.
    return evaluate("hf", folder, tasks, batch_size=4, model_args={"softmax_dtype": "float64"})


def test_metrics_are_those_of_the_harness(ours: Any, theirs: Any) -> None:
    expected = scores(theirs)
    assert set(expected) == set(TASKS)
    for task, found in scores(ours).items():
        assert found == pytest.approx(expected[task], rel=1e-6), task


def flat(values: Any) -> list[float]:
    return [float(leaf) for value in values for leaf in (flat(value) if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize("task", ["choices", "last_word", "perplexity"])
def test_log_likelihoods_are_those_of_the_harness(ours: Any, theirs: Any, task: str) -> None:
    assert flat(answers(ours, task)) == pytest.approx(flat(answers(theirs, task)), abs=1e-4)


def test_texts_are_those_of_the_harness(ours: Any, theirs: Any) -> None:
    assert answers(ours, "answers") == answers(theirs, "answers")
