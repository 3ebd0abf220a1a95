"""Layers that come from the host's memory: what steps take beside the link, and whether answers stay the same.

The same model three times: all on the card, half of its weights there, and as little as can be. A step should take no
longer than the longer of its time with all weights on the card and the link's time for what comes. Then as little once
more, with keys and values in the host's memory: attention there is beside the link as well, and not beside products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np

from gpu.harness.stage import Stage
from llmbatch.engine.calibration.step_timer import StepKind, time_step
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.host_attention import DeviceModel
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.model.outline import HOST_PAGE_SIZE
from llmbatch.engine.weights.residency import least_memory
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.hardware import measure_cpu

_ROWS: Final = 8  # whose tokens are compared
_ONE: Final = 0x3F80  # in bfloat16
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
    yield "least, the host attends", _attended_by_host(stage, least, alone)


def _attended_by_host(stage: Stage, memory: int, alone: dict[str, float]) -> dict[str, Any]:
    """Seconds of the same steps; and of their decodes with few keys, which are what attention does not take."""
    platform = replace(stage.platform, attends_on_host=True, page_size=HOST_PAGE_SIZE)
    loaded = load_model(stage.folder, dtype="bfloat16", load_format="dummy", weights_memory=memory, platform=platform)
    decodes = f"{stage.sizes.rows} decodes"
    kinds = {**_kinds(stage), f"{decodes} of a page": StepKind(stage.sizes.rows, HOST_PAGE_SIZE)}
    pages = max(kind.pages(HOST_PAGE_SIZE) for kind in kinds.values())
    model = DeviceModel(loaded.module, loaded.device)
    engine = CpuEngine(loaded, num_pages=pages, page_size=HOST_PAGE_SIZE, model=model)
    for array in engine.memory:
        array.fill(_ONE if array.dtype == np.uint16 else 1)  # so that all pages are there
    taken = {}
    for name, kind in kinds.items():
        engine.begin(kind.requests(loaded.config.vocab_size))
        seconds = [engine.execute(kind.step(HOST_PAGE_SIZE)).seconds or 0.0 for _ in range(1 + stage.sizes.runs)]
        taken[name] = median(seconds[1:])
    link = 0.0 if loaded.streamed is None else loaded.streamed.seconds
    read = stage.shape.kv_bytes_per_token * stage.sizes.rows * stage.sizes.step_keys
    attention = read / measure_cpu().bytes_per_second
    return {
        "link_seconds": link,
        "read_seconds": attention,
        "seconds": taken,
        "over_bound": taken[decodes] / max(link, alone[decodes], attention),
    }


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
