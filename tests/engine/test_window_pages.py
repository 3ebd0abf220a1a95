"""Models with windows in window pages: the answers of `generate`, and memory for windows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmbatch.engine.cpu.attention import CpuKVCache
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.kernels.cpu.blocks import LOOK_BACK
from llmbatch.kvcache.windows import WindowPages
from llmbatch.planning.workload import Pool
from llmbatch.scheduler.admission_order import Blend, Ends, FromFront
from llmbatch.scheduler.output import Step, StepResult
from tests.support.families import WINDOW
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

MAX_TOKENS = 60
KEPT = WINDOW + LOOK_BACK  # of a sequence
NAMES = ["gemma3", "gpt_oss", "mistral"]

Load = Callable[[str], tuple[LoadedModel, list[list[int]], list[list[int]]]]


def long_prompts() -> list[list[int]]:
    """Three groups with prefixes of some windows, two equal prompts, and one of a token."""
    rng = np.random.default_rng(7)
    prefixes = [rng.integers(0, 256, length).tolist() for length in (75, 50, 9)]
    rows = [prefixes[i % 3] + rng.integers(0, 256, 1 + 5 * i).tolist() for i in range(9)]
    return [*rows, rows[0], [7]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model, rows, and what `generate` says of them."""
    known: dict[str, tuple[LoadedModel, list[list[int]], list[list[int]]]] = {}

    def find(name: str) -> tuple[LoadedModel, list[list[int]], list[list[int]]]:
        if name not in known:
            rows = long_prompts()
            expected = generate(tiny_model(name), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
            folder = tiny_model_folder(tmp_path_factory.mktemp(name), name)
            known[name] = load_model(folder, dtype="float32", platform=HOST), rows, expected
        return known[name]

    return find


class Poisoning(CpuEngine):
    """Writes NaN into each page and window page that is free, before each step."""

    golden: Golden

    def execute(self, step: Step) -> StepResult:
        pages = self.golden.scheduler.state.pages
        for (_, _, in_windows), memory in self._pages.memory.items():
            of: Any = pages.windows if in_windows else pages
            memory[:, of.free[: of.counts[0].free]] = np.nan
        return super().execute(step)


def golden_of(rows: list[list[int]], page_size: int, windows: int) -> Golden:
    """Rows in a pool of little more than the longest, and of so many windows."""
    each = -(-(KEPT - 1) // page_size) + 1
    return Golden(rows, MAX_TOKENS, page_size, windows=WindowPages(KEPT, int(windows * each)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("page_size", "ends", "step_tokens", "windows"),
    [(4, FromFront(), 9, 1), (16, Blend(0.1, 0.2), 64, 3), (1, FromFront(), 200, 4)],
)
def test_answers_are_those_of_generate_and_nothing_is_read_that_was_given_back(
    load: Load, name: str, page_size: int, ends: Ends, step_tokens: int, windows: int
) -> None:
    """Rows share prefixes, prompts are cut into chunks, rows are preempted, and free memory holds no number."""
    loaded, rows, expected = load(name)
    golden = golden_of(rows, page_size, windows)
    engine = Poisoning(loaded, num_pages=golden.num_pages, window_pages=golden.windows.num_pages, page_size=page_size)
    engine.golden = golden
    assert golden.run(engine, ends, step_tokens) == expected
    assert golden.cached > 0 or windows == 1
    assert golden.preemptions > 0 or page_size == 16
    assert max(len(answer) for answer in expected) > 3 * WINDOW


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_fixed_number_of_bytes_holds_more_tokens(tmp_path: Any, name: str) -> None:
    described = describe_model(tiny_model_folder(tmp_path, name), dtype="float32")
    assert described.attention is not None
    memory = 100_000 * described.bytes_per_token
    pool = Pool.of(
        memory, 8, described.bytes_per_token, window_bytes=described.window_bytes, window=described.window,
        most=described.context_length,
    )  # fmt: skip  # arguments in groups
    cache = CpuKVCache(described.attention, num_pages=8, window_pages=3, page_size=8, kv_type=described.kv_type)
    # Two or all of the three layers have windows of 12 tokens. Rows are taken to hold 512 tokens, and of these (12 + 2
    # pages of 8) / 512 in windows.
    full = described.bytes_per_token - described.window_bytes
    assert sum(array.nbytes for array in cache.memory.values()) == 8 * 8 * full + 3 * 8 * described.window_bytes
    assert memory - 20_000 < pool.whole_tokens * described.bytes_per_token <= memory
    assert pool.page_size * pool.windows.num_pages == {"gemma3": 14_792, "gpt_oss": 14_792, "mistral": 100_000}[name]
    assert pool.tokens == {"gemma3": 270_416, "gpt_oss": 270_416, "mistral": 1_828_568}[name]
