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
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from tests.support.families import TABLE
from tests.support.golden import Golden, generate, prompts
from tests.support.models import EOS, FAMILIES, PAD, save_with_tokenizer, tiny_model
from tests.support.paths import ROOT

MAX_TOKENS = 20
DEMO = ROOT / "examples" / "demo"
DEMO_TOKENS = 8  # of an answer


class Families:
    """Tiny models of families; only the one that was asked for last is kept in memory."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._known: dict[str, tuple[str, list[list[int]]]] = {}  # where each lies, and what `generate` says
        self._last: tuple[str, LoadedModel] | None = None

    def load(self, name: str) -> tuple[LoadedModel, list[list[int]]]:
        """A model, and what `generate` says."""
        if name not in self._known:
            model, rows = tiny_model(name), prompts()
            folder = save_with_tokenizer(model, self._folders.mktemp(name))
            self._known[name] = folder, generate(model, rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
        folder, expected = self._known[name]
        if self._last is None or self._last[0] != name:
            self._last = name, load_model(folder, dtype="float32", platform=HOST)
        return self._last[1], expected


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """All families."""
    return Families(tmp_path_factory)


@pytest.mark.parametrize(
    ("page_size", "ends", "step_tokens"),
    [
        (4, Blend(0.1, 0.2), 16),
        pytest.param(1, FromFront(), 5, marks=pytest.mark.slow),
        pytest.param(16, Blend(0.1, 0.2), 64, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TABLE)  # below, so that a family's cases follow each other
def test_every_family_gives_the_answers_of_generate(
    families: Families, name: str, page_size: int, ends: Ends, step_tokens: int
) -> None:
    """Rows share prefixes, prompts are cut into chunks, and rows are preempted where the pool is small."""
    loaded, expected = families.load(name)
    golden = Golden(prompts(), MAX_TOKENS, page_size)
    engine = CpuEngine(loaded, num_pages=golden.num_pages, page_size=page_size)
    assert golden.run(engine, ends, step_tokens) == expected
    assert golden.cached > 0
    assert golden.preemptions > 0 or page_size > 4
    assert len({token for answer in expected for token in answer}) > 20, "a model that repeats itself proves little"


@pytest.mark.parametrize(
    ("page_size", "ends", "step_tokens"),
    [
        (1, Blend(0.1, 0.2), 64),
        (64, FromFront(), 5),
        pytest.param(16, FromFront(), 5, marks=pytest.mark.slow),
        pytest.param(64, Blend(0.1, 0.2), 64, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_generate_though_rows_are_preempted(
    families: Families, name: str, page_size: int, ends: Ends, step_tokens: int
) -> None:
    loaded, expected = families.load(name)
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
    table = pq.read_table(DATA).take([3, 4, 24, 2, 5, 6, 8, 10, 13])  # two share over 400 tokens
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
    expected = generate(model, rows, [DEMO_TOKENS] * len(rows), [2], 2)
    said = tokenizer.decode([np.array(answer, np.int32) for answer in expected])
    return Demo(table, SYSTEM, said, [len(answer) for answer in expected])


@pytest.mark.parametrize(
    ("order", "page_size", "pool_tokens"), [("blend", 8, 900), pytest.param("random", 16, 900, marks=pytest.mark.slow)]
)
def test_smollm2_answers_the_demo_like_generate(
    smollm2: str, demo: Demo, order: Policy, page_size: int, pool_tokens: int
) -> None:
    """In a pool that holds a few rows at a time."""
    operator = LLMOperator(
        model=smollm2,
        prompt="prompt",
        chat=True,
        system=demo.system,
        max_tokens=DEMO_TOKENS,
        dtype="float32",
        order=order,
        page_size=page_size,
        kv_memory=pool_tokens * 46_080,
    )
    answered = operator(demo.table)
    assert answered["generated_text"].to_pylist() == demo.texts
    assert answered["num_generated_tokens"].to_pylist() == demo.lengths
    assert answered["error"].null_count == len(demo.texts)
