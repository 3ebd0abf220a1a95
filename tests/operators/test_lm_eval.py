"""The model for lm-evaluation-harness, against the harness's own `hf` model on the same requests."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbatch.errors import JobError
from llmbatch.inference.table_worker import AnsweredTable, TableWorker
from llmbatch.inference.worker import Worker
from tests.support.models import CHAT_TEMPLATE, tiny_model_folder
from tests.support.paths import ROOT

pytest.importorskip("lm_eval", reason="needs the harness: pip install 'llmbatch[lm-eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and what it imports warn of themselves
LONGEST = 256  # tokens

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "junco", "knoll", "larch"]
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
generation_kwargs: {until: ["z", "9"], max_gen_toks: 12}
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


@pytest.fixture(scope="module")
def ours(folder: str) -> Any:
    from llmbatch.operators.lm_eval import HarnessModel

    return HarnessModel(folder, dtype="float32", device="cpu", max_length=LONGEST, kv_memory=2**24)


@pytest.fixture(scope="module")
def theirs(folder: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    # In float32 a sum of many log-probabilities is off by more than 1e-5.
    return HFLM(folder, dtype="float32", softmax_dtype="float64", device="cpu", max_length=LONGEST, batch_size=4)


def evaluate(model: Any, tasks: Path, names: tuple[str, ...], **options: Any) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=[*names], task_manager=manager, bootstrap_iters=0, **options)


def metrics(result: Any) -> dict[str, dict[str, float]]:
    """Every metric of every task."""
    return {
        task: {name: value for name, value in found.items() if isinstance(value, float)}
        for task, found in result["results"].items()
    }


def answers(result: Any, task: str) -> list[Any]:
    """What each request of a task was answered, in the order of documents."""
    samples = sorted(result["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [answer for sample in samples for answer in sample["resps"]]


def flat(values: Any) -> list[float]:
    """The numbers in nested lists."""
    return [float(leaf) for value in values for leaf in (flat(value) if isinstance(value, list | tuple) else [value])]


@pytest.fixture(scope="module")
def results(ours: Any, theirs: Any, tasks: Path) -> tuple[Any, Any]:
    """All tasks, by llmbatch and by the harness."""
    return evaluate(ours, tasks, tuple(TASKS)), evaluate(theirs, tasks, tuple(TASKS))


def test_metrics_are_those_of_the_harness(results: tuple[Any, Any]) -> None:
    found, expected = map(metrics, results)
    assert set(expected) == set(TASKS)
    for task, values in expected.items():
        assert found[task] == pytest.approx(values, rel=1e-6), task


@pytest.mark.parametrize("task", ["choices", "last_word", "perplexity"])
def test_log_likelihoods_are_those_of_the_harness(results: tuple[Any, Any], task: str) -> None:
    found, expected = (flat(answers(result, task)) for result in results)
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-7)  # one is the sum of 360


def test_texts_are_those_of_the_harness(results: tuple[Any, Any]) -> None:
    found, expected = (answers(result, "answers") for result in results)
    assert found == expected


def test_chats_of_several_turns_are_those_of_the_harness(ours: Any, theirs: Any, tasks: Path) -> None:
    names = ("choices", "answers")
    how = {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "be brief"}
    found, expected = (evaluate(model, tasks, names, **how) for model in (ours, theirs))
    context = found["samples"]["choices"][0]["arguments"][0][0]
    assert context.startswith("<sep>system: be brief")
    assert context.count("<sep>user: ") == 3
    assert flat(answers(found, "choices")) == pytest.approx(flat(answers(expected, "choices")), abs=1e-4)
    assert answers(found, "answers") == answers(expected, "answers")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("", "no context"),
        ("", "<bos>the prefix is the first token"),
        ("spaces go with the word behind them   ", "word"),
        ("<bos>special tokens are there already", " yes"),
        ("a long context loses its beginning: " + "x y " * 60, "and its end stays"),
        ("a", "b" * LONGEST),
    ],
)
def test_boundaries_of_tokens_are_those_of_the_harness(ours: Any, theirs: Any, context: str, continuation: str) -> None:
    asked = requests("loglikelihood", [(context, continuation)])
    assert flat(ours.loglikelihood(asked)) == pytest.approx(flat(theirs.loglikelihood(asked)), abs=1e-4)


def test_choices_of_one_context_compute_it_once(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[AnsweredTable] = []
    answer = Worker.answer

    def noted(worker: Worker, *given: Any) -> AnsweredTable:
        tables.append(answer(worker, *given))
        return tables[-1]

    monkeypatch.setattr(Worker, "answer", noted)
    context = "one context of eighty-one tokens, which are all letters of this sentence in ASCII"
    ours.loglikelihood(requests("loglikelihood", [(context, choice) for choice in (" a", " b", " cd", " ef")]))
    (report,) = [table.report for table in tables]
    assert len(context) == 81
    assert report.cached_tokens == 3 * 80  # whole pages


def test_a_special_token_ends_an_answer_where_it_is_a_stop_string(ours: Any) -> None:
    """Decoded texts do not show it."""
    given = [("after grove and islet comes", {"until": until, "max_gen_toks": 40}) for until in ([], ["<sep>"])]
    whole, ended = ours.generate_until(requests("generate_until", given))
    bias = {"logit_bias": {"259": 100}, "max_gen_toks": 8}
    likely = [("a", {"until": until, **bias}) for until in ([], ["<sep>"])]
    assert whole.startswith(ended)
    assert ours.generate_until(requests("generate_until", likely)) == ["", ""]


def test_what_is_thought_is_cut_off(folder: str, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests("generate_until", [("after grove and islet comes", {"until": [], "max_gen_toks": 20})])
    (whole,) = ours.generate_until(asked)
    monkeypatch.setattr(ours, "think_end_token", whole[3])
    assert ours.generate_until(asked) == [whole.split(whole[3])[-1].lstrip()]


def test_a_parameter_that_is_not_known_is_refused(ours: Any) -> None:
    asked = requests("generate_until", [("a", {"until": [], "num_beams": 4})])
    with pytest.raises(JobError, match="unknown sampling parameter 'num_beams'"):
        ours.generate_until(asked)


def test_answers_are_kept_for_the_next_evaluation(
    ours: Any, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = str(tmp_path / "kept")
    first = evaluate(ours, tasks, tuple(TASKS), use_cache=kept)
    monkeypatch.delattr(TableWorker, "answer")
    assert metrics(evaluate(ours, tasks, tuple(TASKS), use_cache=kept)) == metrics(first)


@pytest.mark.slow
def test_torch_makes_llmbatch_known_to_the_harness(folder: str, tasks: Path) -> None:
    """The command imports no plug-ins, but torch does."""
    if "llmbatch" not in entry_points(group="torch.backends").names:
        pytest.skip("needs the package installed as it is now: pip install -e .")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "llmbatch", "--include_path", str(tasks)),
            *("--model_args", f"pretrained={folder},dtype=float32,kv_memory=16777216", "--tasks", "choices"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "acc_norm" in done.stdout


def test_llmbatch_makes_itself_known_to_the_harness() -> None:
    program = (
        "import llmbatch\nfrom lm_eval.api.registry import get_model\n"
        "print(get_model('llmbatch').__name__, get_model('dummy').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["HarnessModel", "DummyLM"]
