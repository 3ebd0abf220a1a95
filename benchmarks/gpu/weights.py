"""Layers that come from the host's memory: what steps take beside the link, and whether answers stay the same.

The same model three times: all on the card, half of its weights there, and as little as can be. A step should take no
longer than the longer of its time with all weights on the card and the link's time for what comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import numpy as np

from gpu.stage import Stage
from llmbatch.engine.calibration.step_timer import StepKind, time_step
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.weights.residency import least_memory
from llmbatch.kernels.triton.backend import TritonAttention

_ROWS: Final = 8  # whose tokens are compared
_SHARES: Final = (1, 2, 4)  # of the largest chunk that other chunks are


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """For each memory: what stays, what comes and how fast, and seconds of steps against what they should take."""
    whole = int(stage.shape.weight_bytes)
    least = least_memory(stage.shape, is_host=False)
    alone: dict[str, float] = {}
    expected: list[int] = []
    for name, memory in (("all", 2 * whole), ("half", max(least, whole // 2)), ("least", least)):
        engine, streamed = _engine(stage, memory)
        tokens, taken = _tokens(stage, engine), {}
        expected = expected or tokens
        for kind, step in _kinds(stage).items():
            taken[kind] = median(time_step(engine, step, runs=stage.sizes.runs))
        alone = alone or taken
        link = 0.0 if streamed is None else streamed.seconds
        yield (
            name,
            {
                "kept_gb": (whole if streamed is None else streamed.kept_bytes) / 1e9,
                "moved_gb": 0.0 if streamed is None else streamed.streamed_bytes / 1e9,
                "link_gb_s": None if streamed is None else streamed.bytes_per_second / 1e9,
                "link_seconds": link,
                "seconds": taken,
                "over_bound": {kind: taken[kind] / max(alone[kind], link) for kind in taken},
                "equal_tokens": float(np.mean(np.array(tokens) == np.array(expected))),
            },
        )
        del engine


def _kinds(stage: Stage) -> dict[str, StepKind]:
    sizes = stage.sizes
    chunks = {f"a prompt of {sizes.chunk // part}": StepKind(prefills=((0, sizes.chunk // part),)) for part in _SHARES}
    return {f"{sizes.rows} decodes": StepKind(sizes.rows, sizes.step_keys), **chunks}


def _engine(stage: Stage, memory: int) -> tuple[GpuEngine, Any]:
    """Load the model with so much memory for its weights, which are the same ones each time."""
    loaded = load_model(
        stage.folder, dtype="bfloat16", load_format="dummy", weights_memory=memory, platform=stage.platform
    )
    pages = max(kind.pages(stage.page_size) for kind in (*_kinds(stage).values(), _prompts(stage)))
    engine = GpuEngine(loaded, TritonAttention(stage.device), num_pages=pages, page_size=stage.page_size)
    engine.pages.fill()
    return engine, loaded.streamed


def _prompts(stage: Stage) -> StepKind:
    return StepKind(prefills=((0, stage.sizes.chunk // _ROWS),) * _ROWS)


def _tokens(stage: Stage, engine: GpuEngine) -> list[int]:
    """Answer some prompts with a token each, twice: what comes again is what came."""
    kind, tokens = _prompts(stage), list[int]()
    for _ in range(2):
        engine.begin(kind.requests(engine.vocabulary))
        engine.execute(kind.step(stage.page_size))
        tokens += [int(engine.pop_tokens(slot)[0]) for slot in range(_ROWS)]
    return tokens
