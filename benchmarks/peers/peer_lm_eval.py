"""lm-evaluation-harness with llmbatch against its own `hf` model: a multiple-choice task, engines alternating.

    pip install 'llmbatch[lm-eval,gguf]'
    python benchmarks/peers/peer_lm_eval.py [--documents 500] [--shots 5] [--answers letters] [--rounds 3] [--model M]

The task is made of the fact tables of the demo: each document is a question with four choices, which are four requests;
500 documents are 2,000 requests. With `--answers letters` the choices are in the context and a letter is scored, as in
MMLU (`hf` then computes each context once); with `texts` the choices themselves are scored, as in HellaSwag.

Each round runs each engine in a process of its own, in float32. Counted is the evaluation: requests built, tokens made,
model, metrics. Not counted: starting, loading, compiling, and a warming evaluation of four documents. First `hf` runs a
tenth of the documents at each of --batch-sizes, and the fastest is used in all rounds. The last lines say how far
log-likelihoods and metrics are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from mixes import DEMO
from rounds import demo_model

TASK = """
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def make_task(folder: Path, documents: int, answers: str) -> None:
    """Write the documents and the task."""
    draw = random.Random(0)
    subjects = tomllib.loads((DEMO / "sources" / "subjects.toml").read_text(encoding="utf-8"))["subject"]
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(documents):
            subject = draw.choice(subjects)
            facts = draw.sample(subject["facts"], 4)
            label = draw.randrange(4)
            values, letters = [value for _, value in facts], ["A", "B", "C", "D"]
            listed = "".join(f"{letter}. {value}\n" for letter, value in zip(letters, values, strict=True))
            question = f"Question about {subject['name']}: {subject['question'].format(facts[label][0])}\n"
            shown = question + (listed if answers == "letters" else "") + "Answer:"
            choices = letters if answers == "letters" else values
            file.write(json.dumps({"context": shown, "choices": choices, "label": label}) + "\n")
    text = TASK.format(data=folder / "documents.jsonl", cache=folder / "cache")
    (folder / "facts.yaml").write_text(text)


def evaluate(side: str, given: dict[str, Any]) -> dict[str, Any]:
    """Evaluate in this process; returns seconds, metrics and the log-likelihoods by document and choice."""
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    import llmbatch  # noqa: F401 (registers the model)

    torch.set_num_threads(given["cores"])
    how = {"batch_size": given["batch_size"]} if side == "hf" else {}
    model = get_model(side)(pretrained=given["model"], dtype="float32", device="cpu", **how)
    manager = TaskManager(include_path=given["folder"], include_defaults=False)

    def run(limit: int) -> Any:
        return simple_evaluate(
            model, tasks=["facts"], num_fewshot=given["shots"], limit=limit, task_manager=manager, bootstrap_iters=0
        )

    run(4)
    begun = time.perf_counter()
    result = run(given["documents"])
    seconds = time.perf_counter() - begun
    samples = sorted(result["samples"]["facts"], key=lambda sample: sample["doc_id"])
    scores = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
    metrics = {name: float(result["results"]["facts"][f"{name},none"]) for name in ("acc", "acc_norm")}
    return {"seconds": seconds, "scores": scores, "metrics": metrics}


def launch(side: str, given: dict[str, Any]) -> dict[str, Any]:
    """Evaluate in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(given["cores"]), "HF_HUB_OFFLINE": "1"}
    result = Path(given["folder"]) / "result.json"
    command = [sys.executable, sys.argv[0], "--side", side, "--given", json.dumps(given), "--result", str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def compare(options: argparse.Namespace, folder: str) -> None:
    """Find the batch size of `hf`, run the rounds, and print what came of them."""
    from llmbatch.engine.model.checkpoints import resolve_model

    make_task(Path(folder), options.documents, options.answers)
    model = resolve_model(options.model or demo_model())
    given = {"folder": folder, "model": model, "cores": options.cores, "shots": options.shots, "batch_size": 1}
    tenth = {**given, "documents": max(options.documents // 10, 1)}
    tried = {size: launch("hf", {**tenth, "batch_size": size})["seconds"] for size in options.batch_sizes}
    for size, seconds in tried.items():
        print(f"hf, batch size {size:3}: {seconds:8.2f} s for {tenth['documents']} documents", flush=True)
    launch("llmbatch", tenth)  # makes what its caches keep of a machine and a model
    given |= {"documents": options.documents, "batch_size": min(tried, key=lambda size: tried[size])}
    ratios = []
    for number in range(options.rounds):
        sides = ("llmbatch", "hf") if number % 2 == 0 else ("hf", "llmbatch")
        found = {side: launch(side, given) for side in sides}
        ratios.append(found["llmbatch"]["seconds"] / found["hf"]["seconds"])
        figures = ", ".join(f"{side} {one['seconds']:.2f} s" for side, one in found.items())
        print(f"round {number}: {figures}, ratio {ratios[-1]:.3f}", flush=True)
    pairs = zip(found["llmbatch"]["scores"], found["hf"]["scores"], strict=True)
    print(f"ratio, median of {options.rounds}: {statistics.median(ratios):.3f}")
    print(f"log-likelihoods differ by {max(abs(one - other) for one, other in pairs):.2e} at most")
    print("metrics:", *(f"{side} {one['metrics']}" for side, one in found.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure lm-evaluation-harness with llmbatch against its hf model.")
    add = parser.add_argument
    add("--documents", type=int, default=500)
    add("--shots", type=int, default=5)
    add("--answers", choices=("letters", "texts"), default="letters")
    add("--rounds", type=int, default=3)
    add("--cores", type=int, default=2)
    add("--model", help="model of both (SmolLM2-135M-Instruct)")
    add("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--side", choices=("llmbatch", "hf"), help=argparse.SUPPRESS)
    add("--given", type=json.loads, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        options.result.write_text(json.dumps(evaluate(options.side, options.given)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            compare(options, scratch)
