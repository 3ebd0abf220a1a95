"""The same rows through `generate_batch` of transformers, with the same weights and the same length of each answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gpu.harness.stage import Stage
from gpu.jobs import drawn, job, pool_of, requests_of
from llmbatch.preprocess.request_batch import RequestBatch


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Seconds of both, for a slice of a mix whose answers are all as long as its mean, or as a limit."""
    best = stage.calibration.best
    trace, _ = drawn(stage, "table2-4", stage.cost(best))
    requests = requests_of(trace, stage.sizes.model["vocab_size"])
    requests = requests.take(np.arange(stage.sizes.peer))
    length = max(1, min(int(requests.max_tokens.mean()), stage.sizes.peer_answer))
    requests = replace(requests, max_tokens=np.full(len(requests), length, np.int32))
    ours = job(stage, requests, best, pool_of(stage), "blend")["seconds"]
    yield "rows", len(requests)
    yield "answer_tokens", length
    yield "ours", ours
    stage.__dict__.pop("loaded", None)  # its memory is needed
    theirs = peer(stage, requests, length)
    yield "theirs", theirs
    yield "gain", theirs / ours


def peer(stage: Stage, requests: RequestBatch, length: int) -> float:
    """Seconds of transformers, its warm-up left out."""
    config = AutoConfig.from_pretrained(stage.folder)
    untyped: Any = AutoModelForCausalLM
    with stage.device:
        model = untyped.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    rows = [
        requests.tokens[a:b].tolist() for a, b in zip(requests.offsets[:-1].tolist(), requests.offsets[1:].tolist())
    ]
    configured: Any = GenerationConfig
    given = configured(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=rows[:2], generation_config=given)
    begun = time.perf_counter()
    answers = model.generate_batch(inputs=rows, generation_config=given)
    seconds = time.perf_counter() - begun
    assert all(len(answer.generated_tokens) == length for answer in answers.values()), "an answer is too short"
    return seconds
