"""How often bfloat16 answers are those of float32, on the first rows of the demo dataset.

    python benchmarks/engine/agreement.py [--rows 12] [--max-tokens 48]

Greedy answers in two types differ where two tokens are nearly equally likely, and from there on. So that rounding is
not mistaken for an error of ours, transformers' `generate` answers the same rows in bfloat16 too, each alone. Printed
by kind of row and pair: equal answers, and the share of the first answer's characters that come before a difference.
"""

from __future__ import annotations

import argparse
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmbatch import LLMOperator
from llmbatch.choices import DType
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.preprocess.tokenization.loading import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import DATA, KINDS, SYSTEM, smollm2


def ours(table: pa.Table, dtype: DType, max_tokens: int) -> list[str]:
    """The answers of the operator, in one type of weights and KV."""
    operator = LLMOperator(
        model=str(smollm2()),
        prompt="prompt",
        chat=True,
        system=SYSTEM,
        max_tokens=max_tokens,
        dtype=dtype,
        kv_memory=2**31,
    )
    answers: list[str] = operator(table)["generated_text"].to_pylist()
    return answers


def theirs(table: pa.Table, dtype: str, max_tokens: int) -> list[str]:
    """The answers of `generate`, row by row."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = resolve_model(str(smollm2()))
    tokenizer = load_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    configured: Any = GenerationConfig
    config = configured(do_sample=False, max_new_tokens=max_tokens, eos_token_id=[2], pad_token_id=2)
    answers = []
    for prompt in table["prompt"].to_pylist():
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        text = tokenizer.render_chat(chat, {"add_generation_prompt": True})
        ids = torch.tensor(tokenizer.encode([text], False).tokens)
        out = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), generation_config=config)
        answers.append(out[0, len(ids) :].numpy().astype(np.int32))
    return tokenizer.decode(answers)


def before_difference(one: str, other: str) -> int:
    """Characters that two texts have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def main() -> None:
    """Answer the rows four ways and print the rates."""
    parser = argparse.ArgumentParser(description="Measure agreement of bfloat16 with float32.")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()
    table, most = pq.read_table(DATA).slice(0, arguments.rows), arguments.max_tokens
    answers = {
        "ours float32": ours(table, "float32", most),
        "ours bfloat16": ours(table, "bfloat16", most),
        "generate float32": theirs(table, "float32", most),
        "generate bfloat16": theirs(table, "bfloat16", most),
    }
    kinds = table["kind"].to_pylist()
    for one, other in (
        ("ours float32", "generate float32"),
        ("ours float32", "ours bfloat16"),
        ("generate float32", "generate bfloat16"),
        ("ours bfloat16", "generate bfloat16"),
    ):
        for kind in KINDS:
            pairs = [(answers[one][i], answers[other][i]) for i in range(len(kinds)) if kinds[i] == kind]
            equal = sum(a == b for a, b in pairs)
            kept = sum(before_difference(a, b) for a, b in pairs)
            share = kept / max(1, sum(len(a) for a, _ in pairs))
            print(f"{one} / {other}: {kind:8} {equal} of {len(pairs)} equal, {share:.1%} before a difference")


if __name__ == "__main__":
    main()
