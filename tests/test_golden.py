"""The real scheduler over the real engine gives the answers of `generate`: every family, page, step and pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from llmbatch import LLMOperator
from llmbatch.budget import FixedBudget
from llmbatch.ends import Blend, Ends, InOrder
from llmbatch.engines.checkpoints import resolve_model
from llmbatch.engines.loading import LoadedModel, load_model
from llmbatch.engines.torch import TorchEngine
from llmbatch.requests import Requests
from llmbatch.sampling import SamplingParams
from llmbatch.schedule import Scheduler, Waiting
from llmbatch.tokenize import load_tokenizer
from tests.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder
from tests.workloads import RATES, Believed, Workload

MAX_TOKENS = 20
DEMO = Path(__file__).parent.parent / "examples" / "demo"


def prompts() -> list[list[int]]:
    """Three groups with prefixes of 33, 20 and 5 tokens, two equal prompts, prompts of one token."""
    rng = np.random.default_rng(5)
    prefixes = [rng.integers(0, 256, length).tolist() for length in (33, 20, 5)]
    rows = [prefixes[i % 3] + rng.integers(0, 256, 1 + i).tolist() for i in range(9)]
    return [*rows, rows[0], [7], [9]]


def generate(model: Any, rows: list[list[int]], limits: list[int], eos: list[int], pad: int) -> list[list[int]]:
    """What transformers says of each row alone, with an otherwise empty GenerationConfig."""
    configured: Any = GenerationConfig
    answers = []
    for row, limit in zip(rows, limits, strict=True):
        ids = torch.tensor([row])
        config = configured(do_sample=False, max_new_tokens=limit, eos_token_id=eos, pad_token_id=pad)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answers.append(out[0, len(row) :].tolist())
    return answers


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """A family's tiny model, loaded, and what `generate` says."""
    loaded = load_model(tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param), dtype="float32")
    rows = prompts()
    return loaded, generate(tiny_model(request.param), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("ends", "step_tokens"), [(InOrder(), 5), (Blend(), 64)])
def test_answers_are_those_of_generate_though_rows_are_preempted(
    family: tuple[LoadedModel, Any], page_size: int, ends: Ends, step_tokens: int
) -> None:
    loaded, expected = family
    rows = prompts()
    lengths = np.array([len(row) for row in rows], np.int32)
    requests = Requests(
        tokens=np.concatenate([np.array(row, np.int32) for row in rows]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=np.full(len(rows), MAX_TOKENS, np.int32),
        params_index=np.zeros(len(rows), np.int32),
        params=(SamplingParams(max_tokens=MAX_TOKENS),),
        serial=np.arange(len(rows), dtype=np.uint64),
        recorded=np.full(len(rows), MAX_TOKENS, np.int32),
    )
    # The pool holds little more than the longest, and every answer is believed to be a single token.
    num_pages = -(-(int(lengths.max()) + MAX_TOKENS) // page_size) + 1
    believed = np.ones(len(rows))
    trie = Workload(rows, requests.max_tokens, believed).trie(page_size)
    scheduler = Scheduler(
        lengths, num_pages=num_pages, trie=trie, lengths=Believed(believed), rates=RATES, max_running=16
    )
    order = np.arange(len(rows), dtype=np.int32)
    scheduler.enqueue(Waiting(order, believed, ends, FixedBudget(step_tokens), compute=1.0, memory=1.0))
    engine = TorchEngine(loaded, num_pages=num_pages, page_size=page_size)
    engine.begin(requests)
    answers: dict[int, list[int]] = {}
    cached = 0
    while not scheduler.done:
        step = scheduler.decide()
        finished = scheduler.commit(step, engine.execute(step))
        scheduler.check()
        cached += step.cached_tokens
        for request, slot in zip(finished.requests.tolist(), finished.slots.tolist(), strict=True):
            answers[request] = engine.retire(slot).tolist()
    assert [answers[request] for request in range(len(rows))] == expected
    assert scheduler.preemptions > 0 or page_size > 1
    assert cached > 0 or page_size == 64


@pytest.mark.parametrize(("order", "page_size", "pool_tokens"), [("blend", 8, 1500), ("random", 16, 900)])
def test_smollm2_answers_the_demo_like_generate(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, order: str, page_size: int, pool_tokens: int
) -> None:
    """Rows of the demo dataset with their prefixes, in a pool that holds a few of them at a time."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(DEMO)])
    from run import DATA, SYSTEM  # type: ignore[import-not-found, unused-ignore]

    table = pq.read_table(DATA).slice(0, 14)
    operator = LLMOperator(
        model=smollm2, prompt="prompt", chat=True, system=SYSTEM, max_tokens=12, dtype="float32",
        order=order, page_size=page_size, kv_memory=pool_tokens * 46_080,
    )  # fmt: skip
    answered = operator(table)
    folder = resolve_model(smollm2)
    tokenizer = load_tokenizer(folder)
    texts = [
        tokenizer.render_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}],
            {"add_generation_prompt": True},
        )
        for prompt in table["prompt"].to_pylist()
    ]
    column = tokenizer.encode(texts, False)
    rows = [column.tokens[a:b].tolist() for a, b in zip(column.offsets, column.offsets[1:], strict=False)]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = generate(model, rows, [12] * len(rows), [2], 2)
    assert answered["generated_text"].to_pylist() == tokenizer.decode([np.array(a, np.int32) for a in expected])
    assert answered["num_generated_tokens"].to_pylist() == [len(answer) for answer in expected]
    assert answered["error"].null_count == len(rows)
