"""Rounds in which llmbatch and one other engine answer the same rows, each in a fresh process, one after the other.

A round starts each engine in a process of its own, loads the model, warms it with four prompts that are not among the
rows, and answers all rows once; which engine goes first changes from round to round. Both get the same model folder,
number type, prompts (chat template and system message) and both cores. Sampling is greedy, no answer ends at its end
token, and each row's number of generated tokens is given: a round in which an engine generated another number for any
row is an error.

Counted: rendered prompts in, texts out: tokenising, planning, scheduling, the model, detokenising. Not counted:
starting, loading, compiling, warming. Tokens per second are (input + output tokens) / seconds, cached input tokens
included.

Both run as their authors advise for a machine of its own. llmbatch: `GOMP_SPINCOUNT=300000`, its pool of KV as large as
the peer's. Before the first round it answers a tenth of the rows, which makes what its caches keep of a machine and a
model; a peer compiles while it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixes import DEMO, MIXES, SYSTEM, rows_of

WARM = ["The weather today is", "My favourite dish is", "In the year 2000", "A good book is"]
WARM_TOKENS = 8
OURS = "llmbatch"
KV_GIB = 4  # of each engine
DTYPES = ("float32", "bfloat16", "int8")

PER_ROW = ("prompts", "max_tokens")

Work = dict[str, Any]  # what both engines are given, as JSON
Figures = dict[str, Any]  # what came of it: seconds, input_tokens, cached_tokens, generated and texts of each row


@dataclass(frozen=True)
class Peer:
    """Another engine: how it is started, and how it answers the rows in its own process."""

    name: str
    measure: Callable[[Work], Figures]  # in its process, which need not have llmbatch
    add_options: Callable[[argparse.ArgumentParser], None]
    settings: Callable[[argparse.Namespace], dict[str, Any]]  # what `measure` finds under `settings`, and is printed
    environment: Callable[[argparse.Namespace], dict[str, str]]


def run(peer: Peer) -> int:
    """Compare, or, with --side, measure one engine in this process; returns the exit status."""
    parser = argparse.ArgumentParser(description=f"Measure llmbatch against {peer.name}.")
    add = parser.add_argument
    add("--peer-python", help=f"Python of the environment that holds {peer.name}")
    add("--rounds", type=int, default=3)
    add("--cores", type=int, default=2)
    add("--dtype", choices=DTYPES, default="float32", help="of llmbatch, and of the peer where it takes one")
    add("--order", default="blend", help="order of llmbatch")
    add("--model", help="model of both (SmolLM2-135M-Instruct)")
    add("--mix", default=MIXES[0], help=f"{', '.join(MIXES)}, or a Parquet file with the columns prompt and sampling")
    add("--every", type=int, default=1, metavar="N", help="answer every Nth row only")
    add("--json", action="store_true", help="one JSON object on standard output")
    add("--side", choices=(OURS, peer.name), help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    peer.add_options(parser)
    options = parser.parse_args()
    if options.side is not None:
        measure = measure_llmbatch if options.side == OURS else peer.measure
        options.result.write_text(json.dumps(measure(json.loads(options.work.read_text()))))
        return 0
    result = compare(peer, options)
    if options.json:
        print(json.dumps(result))
    return 0


def compare(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the engines for all rounds and put their figures together; prints each round as it ends."""
    say = sys.stderr if options.json else sys.stdout
    work = prepare(peer, options)
    shown = {key: value for key, value in work.items() if key not in PER_ROW}
    print(f"{len(work['prompts'])} rows of {options.mix}; {json.dumps(shown)}", file=say)
    print("round  engine         seconds   input  cached  output  tokens/s", file=say, flush=True)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "work.json"
        tenth = {key: value[::10] if key in PER_ROW else value for key, value in work.items()}
        file.write_text(json.dumps(tenth))
        launch(OURS, peer, options, file)
        file.write_text(json.dumps(work))
        for number in range(options.rounds):
            engines = (OURS, peer.name) if number % 2 == 0 else (peer.name, OURS)
            figures = {}
            for engine in engines:
                figures[engine] = launch(engine, peer, options, file)
                print(line(number, engine, figures[engine]), file=say, flush=True)
            texts = [figures[engine].pop("texts") for engine in engines]
            equal = sum(one == other for one, other in zip(*texts, strict=True)) / len(texts[0])
            ratio = figures[OURS]["tokens_per_second"] / figures[peer.name]["tokens_per_second"]
            rounds.append({**figures, "ratio": ratio, "equal_texts": equal})
            print(f"{number:5}  ratio {ratio:.3f}, equal texts {equal:.1%}", file=say, flush=True)
    summary = {name: spread([one[name]["tokens_per_second"] for one in rounds]) for name in (OURS, peer.name)}
    summary["ratio"] = spread([one["ratio"] for one in rounds])
    for name, value in summary.items():
        print(f"{name:12} median {value['median']:.3f}, least {value['least']:.3f}, most {value['most']:.3f}", file=say)
    return {"mix": options.mix, "rows": len(work["prompts"]), **shown, "rounds": rounds, **summary}


def prepare(peer: Peer, options: argparse.Namespace) -> Work:
    """The work of both engines: model folder, rendered prompts, tokens of each answer, settings."""
    from transformers import AutoTokenizer

    from llmbatch.engine.model.checkpoints import resolve_model

    folder = resolve_model(options.model or demo_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = rows_of(options.mix)[:: options.every]
    return {
        "model": folder,
        "dtype": options.dtype,
        "order": options.order,
        "cores": options.cores,
        "kv_gib": KV_GIB,
        "settings": peer.settings(options),
        "prompts": [
            tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt, _ in rows
        ],
        "max_tokens": [generated for _, generated in rows],
    }


def demo_model() -> str:
    """The GGUF file of the demo."""
    sys.path.insert(0, str(DEMO))
    from run import smollm2

    return str(smollm2())


def launch(engine: str, peer: Peer, options: argparse.Namespace, work: Path) -> Figures:
    """One round of one engine in a fresh process. Raises SystemExit with its last words where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.cores), "HF_HUB_OFFLINE": "1"}
    python = sys.executable
    if engine == OURS:
        environment["GOMP_SPINCOUNT"] = "300000"
    else:
        environment |= peer.environment(options)
        python = options.peer_python or python
    result = work.with_name("result.json")
    command = [python, sys.argv[0], "--side", engine, "--work", str(work), "--result", str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{engine} ended with status {done.returncode}:\n{(done.stderr or done.stdout)[-4000:]}")
    figures: Figures = json.loads(result.read_text())
    given = json.loads(work.read_text())["max_tokens"]
    generated = figures.pop("generated")
    for row, (asked, got) in enumerate(zip(given, generated, strict=True)):
        if asked != got:
            raise SystemExit(f"{engine} generated {got} tokens for row {row}, which asks for {asked}")
    figures["output_tokens"] = sum(generated)
    figures["tokens_per_second"] = (figures["input_tokens"] + figures["output_tokens"]) / figures["seconds"]
    return figures


def measure_llmbatch(work: Work) -> Figures:
    """Answer the rows through LLMOperator in this process."""
    import pyarrow as pa

    from llmbatch import LLMOperator

    operator = LLMOperator(
        model=work["model"],
        prompt="prompt",
        sampling_params="sampling",
        dtype=work["dtype"],
        kv_memory=work["kv_gib"] * 2**30,
        order=work["order"],
    )

    def table(prompts: list[str], lengths: list[int]) -> Any:
        return pa.table({"prompt": prompts, "sampling": [{"max_tokens": n, "ignore_eos": True} for n in lengths]})

    operator(table(WARM, [WARM_TOKENS] * len(WARM)))
    rows = table(work["prompts"], work["max_tokens"])
    begun = time.perf_counter()
    answered = operator(rows)
    seconds = time.perf_counter() - begun
    failed = rows.num_rows - answered["error"].null_count
    if failed:
        raise SystemExit(f"llmbatch: {failed} rows failed")
    return {
        "seconds": seconds,
        "input_tokens": sum(answered["num_input_tokens"].to_pylist()),
        "cached_tokens": sum(answered["num_cached_tokens"].to_pylist()),
        "generated": answered["num_generated_tokens"].to_pylist(),
        "texts": answered["generated_text"].to_pylist(),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def line(number: int, engine: str, figures: Figures) -> str:
    """One line of the table."""
    return (
        f"{number:5}  {engine:12} {figures['seconds']:9.1f} {figures['input_tokens']:7} "
        f"{figures['cached_tokens']:7} {figures['output_tokens']:7} {figures['tokens_per_second']:9.1f}"
    )
