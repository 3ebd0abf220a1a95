"""A model on several GPUs: what steps take beside one GPU and beside the prediction, and whether answers stay the same.

Ranks are as many as the machine has GPUs, at most, in powers of two. A step is predicted to take what it takes on one
GPU over their number, and what the sums behind attention and MLP take by the link's data sheet
(`llmbatch.perf_model.collectives`). Recorded steps are those of decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from gpu.harness.stage import Stage
from llmbatch.engine.calibration.step_timer import StepKind, time_step
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.ranks.gpu.first import first_of_gpus, ranked_engine, teams_on_gpus
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.perf_model.collectives import with_sums
from llmbatch.perf_model.hardware import link_of

_ROWS: Final = 8  # whose tokens are compared


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """For each number of ranks: seconds of steps, the prediction, and the share of tokens that are those of one GPU."""
    gpus = 2 if stage.dry else torch.cuda.device_count()
    alone: dict[str, float] = {}
    expected: list[int] = []
    for ranks in (count for count in (1, 2, 4, 8) if count <= gpus):
        engine = _engine(stage, ranks)
        tokens = _tokens(stage, engine)
        engine.record([stage.sizes.rows])
        taken = {name: median(time_step(engine, kind, runs=stage.sizes.runs)) for name, kind in _kinds(stage).items()}
        alone, expected = alone or taken, expected or tokens
        predicted = {name: alone[name] / ranks + _sums(stage, ranks, kind) for name, kind in _kinds(stage).items()}
        yield (
            f"{ranks} GPUs",
            {
                "seconds": taken,
                "over_predicted": {name: taken[name] / predicted[name] for name in taken},
                "times_one": {name: alone[name] / taken[name] for name in taken},
                "equal_tokens": float(np.mean(np.array(tokens) == np.array(expected))),
            },
        )
        del engine
    if gpus == 1:
        yield "left out", "this machine has one GPU: ranks have one each"


def _kinds(stage: Stage) -> dict[str, StepKind]:
    rows, chunk = stage.sizes.rows, stage.sizes.chunk
    return {
        f"{rows} decodes": StepKind(rows, stage.sizes.step_keys),
        f"a prompt of {chunk}": StepKind(prefills=((0, chunk),)),
    }


def _prompts(stage: Stage) -> StepKind:
    return StepKind(prefills=((0, stage.sizes.chunk // _ROWS),) * _ROWS)


def _sums(stage: Stage, ranks: int, kind: StepKind) -> float:
    """Seconds that a step's sums take by the data sheet."""
    hardware = replace(stage.ceilings, link=link_of(stage.ceilings.name), step_seconds=0.0, token_seconds=0.0)
    joined = with_sums(replace(stage.ceiling_cost, hardware=hardware), ranks).hardware
    tokens = kind.decodes + sum(chunk for _, chunk in kind.prefills)
    return joined.step_seconds + tokens * joined.token_seconds


def _engine(stage: Stage, ranks: int) -> GpuEngine:
    """Load the same noise on so many GPUs; on one by the same way, with sums of one."""
    platform = first_of_gpus(stage.platform, ranks)
    loaded = load_model(stage.folder, dtype="bfloat16", load_format="dummy", platform=platform)
    size = stage.page_size
    pages: dict[str, Any] = {
        "num_pages": max(kind.pages(size) for kind in (*_kinds(stage).values(), _prompts(stage))),
        "window_pages": 0,
        "page_size": size,
    }
    attention, recorder = TritonAttention(stage.device), None if stage.dry else GraphRecorder
    if ranks == 1:
        engine = GpuEngine(loaded, attention, **pages, recorder=recorder and recorder())
    else:
        orders = RankOrders(
            ranks=ranks,
            folder=stage.folder,
            dtype="bfloat16",
            kv_cache_dtype="auto",
            load_format="dummy",
            trust_remote_code=False,
            context_length=loaded.context_length,
        )
        teams = teams_on_gpus(replace(platform, copies=None), orders)
        engine = ranked_engine(loaded, attention, teams, pages, recorder=recorder)
    engine.pages.fill()
    return engine


def _tokens(stage: Stage, engine: GpuEngine) -> list[int]:
    """Answer some prompts with a token each."""
    kind = _prompts(stage)
    engine.begin(kind.requests(engine.vocabulary))
    engine.execute(kind.step(stage.page_size))
    return [int(engine.pop_tokens(slot)[0]) for slot in range(_ROWS)]
