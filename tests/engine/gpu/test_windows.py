"""Layers with windows in window pages of a device: the answers of `generate`, with no number in what is free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from llmbatch.engine.gpu.attention import PAGE_SIZE, GpuOps
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder, Recorder
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.platform import Platform
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.kernels.work_items import LOOK_BACK
from llmbatch.kvcache.windows import WindowPages
from llmbatch.scheduler.admission_order import FromFront
from llmbatch.scheduler.output import Step, StepResult
from tests.engine.gpu.test_engine import LAYERS
from tests.engine.gpu.test_execution import Again
from tests.support.families import WINDOW
from tests.support.golden import Golden, generate
from tests.support.models import EOS, PAD, tiny_model, tiny_model_folder

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PLATFORM = Platform(DEVICE, GpuOps(DEVICE), PAGE_SIZE, max_running=512)
MAX_TOKENS = 4
PAGE = 8  # tokens
NAN_OF_E4M3 = 0x7F


def prompts() -> list[list[int]]:
    """Two rows that share 150 tokens, more than kernels read of a window, and one by itself."""
    rng = np.random.default_rng(9)
    prefix = rng.integers(0, 256, 150).tolist()
    own = [rng.integers(0, 256, length).tolist() for length in (3, 12, 30)]
    return [*(prefix + rest for rest in own[:2]), own[2]]


class Poisoning(GpuEngine):
    """Writes NaN into each page and window page that is free, before each step."""

    golden: Golden

    def submit(self, step: Step) -> StepResult | None:
        """Queue a step."""
        pages = self.golden.scheduler.state.pages
        for layer, spec in self.pages.specs.items():
            of: Any = pages.windows if self.pages.in_windows(spec) else pages
            free = torch.from_numpy(of.free[: of.counts[0].free].astype(np.int64)).to(DEVICE)
            for tensor in (self.pages.keys[layer], self.pages.values[layer]):
                if tensor.dtype == torch.float8_e4m3fn:  # which cannot be indexed
                    tensor.view(torch.uint8)[free] = NAN_OF_E4M3
                else:
                    tensor[free] = torch.nan
        return super().submit(step)


def answers_in_windows(loaded: LoadedModel, recorder: Recorder | Any = None) -> list[list[int]]:
    """Of the rows of `prompts`, in window pages for little more than two windows."""
    kept = WINDOW + LOOK_BACK
    windows = WindowPages(kept, 2 * (-(-(kept - 1) // PAGE) + 1))
    golden = Golden(prompts(), MAX_TOKENS, PAGE, spare_pages=8, windows=windows)
    engine = Poisoning(
        loaded, TritonAttention(DEVICE), num_pages=golden.num_pages, window_pages=windows.num_pages, page_size=PAGE,
        recorder=recorder,
    )  # fmt: skip  # arguments in groups
    engine.golden = golden
    engine.record(range(1, len(golden.rows) + 1), (32, 64))
    answers = golden.run(engine, FromFront(), 64)
    assert golden.cached > 0
    return answers


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a gate, which is 0 then
@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        ("gpt_oss", False),
        pytest.param("mistral", False, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_generate_and_nothing_is_read_that_was_given_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, recorded: bool
) -> None:
    folder = tiny_model_folder(tmp_path_factory.mktemp(name), name, layers=LAYERS)
    rows = prompts()
    expected = generate(tiny_model(name, layers=LAYERS), rows, [MAX_TOKENS] * len(rows), [EOS], PAD)
    loaded = load_model(folder, dtype="float32", platform=PLATFORM)
    recorder: Recorder | Any = None
    if recorded:
        recorder = GraphRecorder() if DEVICE.type == "cuda" else Again()
    assert answers_in_windows(loaded, recorder) == expected
    if isinstance(recorder, Again):
        assert recorder.repeated > 0
