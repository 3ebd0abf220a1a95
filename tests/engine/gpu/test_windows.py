"""Layers with windows in window pages of a device: the answers of `generate`, with no number in what is free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.cuda_graphs import GraphRecorder, Recorder
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.platform import Platform
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.kernels.work_items import LOOK_BACK
from llmbatch.kvcache.windows import WindowPages
from llmbatch.scheduler.admission_order import FromFront
from llmbatch.scheduler.output import Step, StepResult
from tests.engine.gpu.test_execution import Again
from tests.support.families import WINDOW
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512)
MAX_TOKENS = 6


def prompts() -> list[list[int]]:
    """Two rows that share 150 tokens, more than kernels read of a window, and one by itself."""
    rng = np.random.default_rng(9)
    prefix = rng.integers(0, 256, 150).tolist()
    own = [rng.integers(0, 256, length).tolist() for length in (3, 12, 30)]
    return [*(prefix + rest for rest in own[:2]), own[2]]


class Poisoning(GpuEngine):
    """Writes NaN into each page and window page that is free, before each step."""

    golden: Golden

    def submit(self, step: Step) -> StepResult:
        """Queue a step."""
        pages = self.golden.scheduler.state.pages
        for layer, spec in self.pages.specs.items():
            of: Any = pages.windows if self.pages.in_windows(spec) else pages
            free = torch.from_numpy(of.free[: of.counts[0].free].astype(np.int64)).to(DEVICE)
            self.pages.keys[layer][free] = self.pages.values[layer][free] = torch.nan
        return super().submit(step)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a gate, which is 0 then
@pytest.mark.parametrize(("name", "recorded"), [("gemma3", True), ("gpt_oss", False), ("mistral", False)])
def test_answers_are_those_of_generate_and_nothing_is_read_that_was_given_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, recorded: bool
) -> None:
    folder = tiny_model_folder(tmp_path_factory.mktemp(name), name)
    rows = prompts()
    expected = generate(tiny_model(name), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded = load_model(folder, dtype="float32", platform=PLATFORM)
    kept = WINDOW + LOOK_BACK
    windows = WindowPages(kept, 2 * (-(-(kept - 1) // 8) + 1))
    golden = Golden(rows, MAX_TOKENS, page_size=8, spare_pages=8, windows=windows)
    recorder: Recorder | Any = None
    if recorded:
        recorder = GraphRecorder() if DEVICE.type == "cuda" else Again()
    engine = Poisoning(
        loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, window_pages=windows.num_pages, page_size=8,
        recorder=recorder,
    )  # fmt: skip  # arguments in groups
    engine.golden = golden
    engine.record(range(1, len(rows) + 1), (32, 64))
    assert golden.run(engine, FromFront(), 64) == expected
    assert golden.cached > 0
    if isinstance(recorder, Again):
        assert recorder.repeated > 0
