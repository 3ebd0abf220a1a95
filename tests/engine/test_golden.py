"""The real scheduler over the real engine gives the answers of `generate`: every family, page, step and pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmbatch import LLMOperator
from llmbatch.choices import Policy
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.preprocess.tokenizer import load_tokenizer
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from tests.support.golden import Golden, generate, prompts
from tests.support.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder
from tests.support.paths import ROOT

MAX_TOKENS = 20
DEMO = ROOT / "examples" / "demo"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """A family's tiny model, loaded, and what `generate` says."""
    loaded = load_model(
        tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param), dtype="float32", platform=HOST
    )
    rows = prompts()
    return loaded, generate(tiny_model(request.param), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("ends", "step_tokens"), [(FromFront(), 5), (Blend(0.1, 0.2), 64)])
def test_answers_are_those_of_generate_though_rows_are_preempted(
    family: tuple[LoadedModel, Any], page_size: int, ends: Ends, step_tokens: int
) -> None:
    loaded, expected = family
    golden = Golden(prompts(), MAX_TOKENS, page_size)
    engine = CpuEngine(loaded, num_pages=golden.num_pages, page_size=page_size)
    assert golden.run(engine, ends, step_tokens) == expected
    assert golden.preemptions > 0 or page_size > 1
    assert golden.cached > 0 or page_size == 64


@dataclass(frozen=True, slots=True)
class Demo:
    """Rows of the demo dataset, and what `generate` says of each."""

    table: pa.Table
    system: str
    texts: list[str]
    lengths: list[int]


@pytest.fixture(scope="module")
def demo(smollm2: str) -> Demo:
    """Rows of the demo dataset with their prefixes, answered by transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        from run import DATA, SYSTEM  # type: ignore[import-not-found, unused-ignore]
    table = pq.read_table(DATA).take([3, 4, 24, 2, 25, 5, 28, 6, 8, 10, 13])  # two pairs share over 400 tokens
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
    said = tokenizer.decode([np.array(answer, np.int32) for answer in expected])
    return Demo(table, SYSTEM, said, [len(answer) for answer in expected])


@pytest.mark.parametrize(("order", "page_size", "pool_tokens"), [("blend", 8, 1500), ("random", 16, 900)])
def test_smollm2_answers_the_demo_like_generate(
    smollm2: str, demo: Demo, order: Policy, page_size: int, pool_tokens: int
) -> None:
    """In a pool that holds a few rows at a time."""
    operator = LLMOperator(
        model=smollm2,
        prompt="prompt",
        chat=True,
        system=demo.system,
        max_tokens=12,
        dtype="float32",
        order=order,
        page_size=page_size,
        kv_memory=pool_tokens * 46_080,
    )
    answered = operator(demo.table)
    assert answered["generated_text"].to_pylist() == demo.texts
    assert answered["num_generated_tokens"].to_pylist() == demo.lengths
    assert answered["error"].null_count == len(demo.texts)
