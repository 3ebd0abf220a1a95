"""Whether answers are right on this card, before anything is timed: a minute, and it ends the run if one is not.

Attention of some 700 keys against float64, so long that keys are cut and decodes run beside a chunk, by launches of the
step and of any step; a two-layer model whose recorded steps, of decodes alone and with chunks, must give the tokens of
those that are launched kernel by kernel, and whose layers in FP8 must give logits near those of bfloat16; the same of
pages of FP8, and how they are written; and a recording that fails on purpose, after which the allocator must still
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from gpu.harness.stage import Stage
from gpu.kernels import ALONE, Attention, Step, padded
from llmbatch.engine.calibration.step_timer import StepKind
from llmbatch.engine.gpu.engine import GpuEngine
from llmbatch.engine.gpu.fp8_linear import Fp8Linear
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder, Recorder
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.fusion.layers import FusedLayer
from llmbatch.engine.model.loader import LoadedModel, load_weights
from llmbatch.engine.model.outline import KVType
from llmbatch.kernels.cascade import GROUP_ROWS, GROUP_TOKENS, GROUPS
from llmbatch.kernels.triton import fused as triton_fused
from llmbatch.kernels.triton.backend import TritonAttention
from llmbatch.kernels.triton.fp8 import ELEMENT

LAYERS: Final = 2
FP8_PAGES: Final = KVType("float8_e4m3fn", 1)
LEAST_EQUAL: Final = 0.9  # padded rows may change the order of sums, and random weights make ties
_MIXED_TOKENS: Final = 96  # of a recorded step with chunks
_TOLERANCE: Final = 2e-2  # of attention in bfloat16, relative to float64
_FP8_TOLERANCE: Final = 5e-2  # of a product in FP8, likewise
_STORED_TOLERANCE: Final = 1e-3  # of what is rounded otherwise
_LOGITS_TOLERANCE: Final = 0.25  # of what FP8 makes of logits: some seven products, one after the other


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """What is wrong, if anything; exits after the last check if something was."""
    wrong = []
    for how, attention in (("", TritonAttention), (" by launches of any step", padded)):
        for name, step in attention_steps(stage, attention).items():
            error = step.error(stage)
            yield f"error of {name}{how}", error
            wrong += [name + how] * (not error < _TOLERANCE)
    small = Stage(str(stage.device), dry=stage.dry, traces=None)
    small.sizes = replace(stage.sizes, model=stage.sizes.model | {"num_hidden_layers": LAYERS})
    fused = sum(isinstance(module, FusedLayer) for module in small.loaded.module.modules())
    yield "fused layers", fused
    wrong += ["fused layers"] * (fused < LAYERS)
    same = share_of_equal_tokens(small.loaded, small)
    yield "share of equal tokens of recorded steps", same
    wrong += ["recorded steps"] * (same < LEAST_EQUAL)
    if stage.has_fp8:
        for name, step in attention_steps(stage, kept=ELEMENT).items():
            error = step.error(stage)
            yield f"error of {name} over pages of fp8", error
            wrong += [f"{name} over pages of fp8"] * (not error < _TOLERANCE)
        error = error_of_stored(stage)
        yield "share of keys and values that are rounded otherwise to fp8", error
        wrong += ["what is stored in fp8"] * (not error < _STORED_TOLERANCE)
        same = share_of_equal_tokens(replace(small.loaded, kv_type=FP8_PAGES), small)
        yield "share of equal tokens of recorded steps over pages of fp8", same
        wrong += ["recorded steps over pages of fp8"] * (same < LEAST_EQUAL)
        for name, error, most in fp8_errors(small):
            yield f"error of {name} in fp8", error
            wrong += [f"{name} in fp8"] * (not error < most)
        same = share_of_equal_tokens(in_fp8(small), small)
        yield "share of equal tokens of recorded steps in fp8", same
        wrong += ["recorded steps in fp8"] * (same < LEAST_EQUAL)
    if not stage.dry:
        failed = after_a_failed_recording(stage.device)
        yield "after a recording that failed", failed or "the allocator works"
        wrong += ["the allocator"] * bool(failed)
    if wrong:
        raise SystemExit(f"wrong on this card: {', '.join(wrong)}")


def attention_steps(
    stage: Stage, attention: Attention = TritonAttention, kept: torch.dtype = torch.bfloat16
) -> dict[str, Step]:
    """Over pages of a type: decodes whose keys are cut, decodes beside chunks, and decodes that share a prefix."""
    make = partial(Step, stage, attention=attention, kept=kept)
    rows = GROUP_ROWS
    few, one = np.array([699, 699]), np.ones(2, np.int32)
    shared = np.full(rows, GROUP_TOKENS + 40)
    return {
        "decodes": make(few, one, 2, 0, together=ALONE),
        "decodes beside chunks": make(np.array([699, 640, 0]), np.array([1, 70, 9]), 1, 0, together=ALONE),
        "decodes that share a prefix": make(shared, np.ones(rows, np.int32), rows, GROUP_TOKENS, together=GROUPS),
    }


class Repeater:
    """Repeats work by doing it again, where there are no graphs (`Recorder`)."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do it once."""
        work()
        return work

    def seconds(self, repeat: Callable[[], None]) -> float:
        """Nothing can be said of it."""
        return 0.0


def share_of_equal_tokens(loaded: LoadedModel, stage: Stage) -> float:
    """Of steps of several numbers of rows, and with a chunk, what share of tokens a recorder leaves the same."""
    same = []
    kinds = [StepKind(rows, 300) for rows in (1, 7, GROUP_ROWS + 1)]
    for kind in (*kinds, StepKind(GROUP_ROWS + 1, 300, ((40, 50), (0, 3)))):
        found = []
        recorder: Recorder = Repeater() if stage.dry else GraphRecorder()
        for given in (None, recorder):
            engine = GpuEngine(
                loaded,
                TritonAttention(stage.device),
                num_pages=kind.pages(stage.page_size),
                page_size=stage.page_size,
                recorder=given,
            )
            for tensor in (*engine.pages.keys.values(), *engine.pages.values.values()):
                pages, generator = tensor[: kind.pages(stage.page_size)], torch.Generator(device=stage.device)
                pages.copy_(torch.randn(pages.shape, generator=generator.manual_seed(0), device=stage.device))
            engine.record((kind.decodes,), (_MIXED_TOKENS,) if kind.prefills else ())
            engine.begin(kind.requests(engine.vocabulary))
            step = kind.step(stage.page_size)
            found.append(engine.execute(step).tokens)
        same.append(found[0] == found[1])
    return float(np.concatenate(same).mean())


def error_of_stored(stage: Stage) -> float:
    """What share of keys and values is not rounded as torch rounds them, cut off at the largest number."""
    tokens, width = 64, 128
    packed = stage.random(tokens, 3 * width) * torch.logspace(-4, 4, tokens, device=stage.device)[:, None].bfloat16()
    keys, values = (torch.zeros(tokens, 1, 1, width, device=stage.device).to(ELEMENT) for _ in range(2))
    places = torch.arange(tokens, dtype=torch.int32, device=stage.device)
    query = packed.new_empty(tokens, width)
    triton_fused.rotate_and_store(packed, query, None, None, None, None, 0.0, places, keys, values)
    found = torch.cat((keys.float(), values.float()), -1).view(tokens, -1)
    return float((found != packed[:, width:].float().clamp(-448, 448).to(ELEMENT).float()).float().mean())


def in_fp8(stage: Stage) -> LoadedModel:
    """The model, with layers in FP8."""
    described = describe_model(stage.folder, dtype="bfloat16", device=stage.device)
    return load_weights(replace(described, layer_type="fp8"), load_format="dummy", platform=stage.platform)


def fp8_errors(stage: Stage) -> Iterator[tuple[str, float, float]]:
    """Errors of layers in FP8, and the most that each may be: of products of few rows and many, and of logits."""
    width = stage.sizes.model["intermediate_size"]
    layer = nn.Linear(width, width, bias=False, device=stage.device, dtype=torch.bfloat16).requires_grad_(False)
    for rows in (1, 16, 200, 1000):
        x = stage.random(rows, width)
        expected = x.double() @ layer.weight.double().T
        yield f"a product of {rows} rows", _distance(Fp8Linear(layer)(x), expected), _FP8_TOLERANCE
    yield "logits", _distance(_logits(stage, in_fp8(stage)), _logits(stage, stage.loaded)), _LOGITS_TOLERANCE


def _logits(stage: Stage, loaded: LoadedModel) -> torch.Tensor:
    """Of a page of tokens."""
    ids = torch.arange(stage.page_size, device=stage.device)[None]
    step = stage.platform.pieces.probe_step(loaded.attention, loaded.dtype, stage.page_size)
    with torch.inference_mode():
        logits: torch.Tensor = loaded.module(input_ids=ids, position_ids=ids, use_cache=False, llmbatch=step).logits
    return logits


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """How far a result is off, relative to what is expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def after_a_failed_recording(device: torch.device) -> str:
    """What goes wrong after a recording that waits for its device, which must fail; nothing should."""
    number = torch.ones(1, device=device)
    recorder = GraphRecorder()

    def wait() -> None:
        number.add_(number.item())

    def add() -> None:
        number.add_(1)

    try:
        recorder.record(wait)
    except RuntimeError:
        pass
    else:
        return "a recording that waits for its device did not fail"
    try:
        torch.cuda.empty_cache()
        recorder.record(add)()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().split("\n")[0]
    return ""
