"""llmbatch against continuous batching of transformers on the same rows, in one run, engines alternating.

    python benchmarks/peers/peer_transformers.py --dtype bfloat16 [--mix answers] [--rounds 3] [--model FOLDER]

What a round is, and what of it is counted, says `peers/rounds.py`; which rows there are, `peers/mixes.py`;
`peers/second_family.py` makes the model of another family that `--model` may name.

`generate_batch` gives all rows one length, so the rows are added one by one to the manager that it makes of them
(`continuous_batching_context_manager`), each with its own. They are added in the order in which it adds them where
prefixes are shared: by their tokens, backwards. Prefixes are shared by whole pages, which have 32 tokens in place of
its 256 (more of a prefix is found). The pool has as many bytes as llmbatch's.

Without flash attention, which a processor does not have, each row attends to the keys of all rows of its batch, behind
a mask. So a large batch costs more than it saves, and the rows of a batch are bounded: of 8, 16 and 32 at most, 8 were
fastest in single small runs with SmolLM2 on one thread of a busy machine. That is a hint, not a measurement: try the
options where the ratio matters. Attention is torch's (`sdpa`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rounds import WARM, WARM_TOKENS, Figures, Peer, Work, run


def measure(work: Work) -> Figures:
    """Answer the rows through continuous batching in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(work["cores"])
    given = work["settings"]
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(
        work["model"], dtype=getattr(torch, work["dtype"]), attn_implementation="sdpa"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    shape = model.config
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head * model.dtype.itemsize
    config = ContinuousBatchingConfig(num_blocks=work["kv_gib"] * 2**30 // (token * given["page_size"]), **given)
    configured: Any = GenerationConfig
    greedy = configured(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=WARM_TOKENS)
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config, timeout=5
        ) as manager,
    ):
        answers(manager, tokenizer(WARM)["input_ids"], [WARM_TOKENS] * len(WARM))
        begun = time.perf_counter()
        tokens = tokenizer(work["prompts"])["input_ids"]
        generated = answers(manager, tokens, work["max_tokens"])
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "input_tokens": sum(map(len, tokens)),
        "cached_tokens": 0,  # it does not say
        "generated": list(map(len, generated)),
        "texts": texts,
    }


def answers(manager: Any, tokens: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Tokens generated for each row."""
    for row in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        manager.add_request(tokens[row], str(row), max_new_tokens=lengths[row], eos_token_id=-1)
    generated: list[list[int]] = [[]] * len(tokens)
    for _ in tokens:
        while (answer := manager.get_result(timeout=1)) is None:
            if not manager.is_running():
                raise SystemExit("continuous batching ended before all rows were answered")
        if answer.error is not None:
            raise SystemExit(f"continuous batching: {answer.error}")
        generated[int(answer.request_id)] = answer.generated_tokens
    return generated


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its settings."""
    add = parser.add_argument
    add("--peer-page-size", type=int, default=32)
    add("--peer-max-requests", type=int, default=8, help="rows of a batch")
    add("--peer-max-batch-tokens", type=int, default=512)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Its settings as its configuration takes them."""
    return {
        "page_size": options.peer_page_size,
        "max_requests_per_batch": options.peer_max_requests,
        "max_batch_tokens": options.peer_max_batch_tokens,
    }


if __name__ == "__main__":
    raise SystemExit(run(Peer("transformers", measure, add_options, settings, lambda _: {})))
