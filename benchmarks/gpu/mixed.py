"""Steps of decodes and a chunk of a small model, launched kernel by kernel and recorded: what the host costs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu.harness.stage import SMALL, Stage
from gpu.smoke import Repeater
from llmbatch.engine.calibration.step_timer import StepKind, time_step
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.mixed import mixed_sizes
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
from llmbatch.kernels.triton.backend import TritonAttention


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Seconds of each both ways, in turns: of steps that fill a recorded size, and that just miss the one below."""
    small = Stage(str(stage.device), dry=stage.dry, traces=None)
    if not stage.dry:
        small.sizes = replace(stage.sizes, model=SMALL)
    sizes = (32, 64) if stage.dry else mixed_sizes(small.shape.layers, small.ceiling_cost.rates)
    yield "sizes", sizes
    decodes = 4 if stage.dry else sizes[0] // 4
    full = [StepKind(decodes, small.sizes.step_keys, ((0, size - decodes),)) for size in sizes]
    padded = [
        StepKind(decodes, small.sizes.step_keys, ((0, size - decodes + 1),)) for size in sizes[:-1]
    ]  # one token more than a size
    pages = max(kind.pages(small.page_size) for kind in (*full, *padded))
    engines = {}
    for name, recorder in (("launched", None), ("recorded", Repeater() if stage.dry else GraphRecorder())):
        engines[name] = GpuEngine(
            small.loaded,
            TritonAttention(small.device),
            num_pages=pages,
            page_size=small.page_size,
            recorder=recorder,
        )
        engines[name].pages.fill()
    engines["recorded"].record((), sizes)
    for what, kinds in (("full", full), ("padded", padded)):
        found = {}
        for kind in kinds:
            seconds = {name: time_step(engine, kind, runs=small.sizes.runs)[1] for name, engine in engines.items()}
            found[kind.step(small.page_size).num_tokens] = seconds | {"gain": seconds["launched"] / seconds["recorded"]}
        yield what, found
