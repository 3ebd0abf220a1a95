"""Each kernel against float64, and against the ceiling that binds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.harness.stage import Stage
from llmbatch.engine.gpu.graphs.recorder import GraphRecorder
from llmbatch.kernels import reference
from llmbatch.kernels.cascade import GROUPS, Groups
from llmbatch.kernels.interface import BatchLayout, PagedAttention
from llmbatch.kernels.spec import SILU, AttentionSpec
from llmbatch.kernels.triton import fused as triton_fused
from llmbatch.kernels.triton.backend import PaddedLaunches, TritonAttention
from llmbatch.kernels.triton.fp8 import ELEMENT

PAGE = 16
ALONE = Groups(0)
Attention = Callable[[torch.device, Groups], PagedAttention]
BEYOND_CACHES = 256 << 20  # bytes; the L2 of current cards has up to 128 MB


def padded(device: torch.device, groups: Groups) -> PaddedLaunches:
    """What attends by launches that are those of any step."""
    return TritonAttention(device, groups).padded


def measure(stage: Stage) -> Iterator[tuple[str, Any]]:
    """Share of the ceiling and relative error of each."""
    sizes, model = stage.sizes, stage.sizes.model
    yield "decode", decodes(stage, np.full(sizes.rows, sizes.keys), 0, together=ALONE)
    lengths = np.random.default_rng(0).integers(1, 2 * sizes.keys, sizes.rows)
    yield "decode_of_uneven_lengths", decodes(stage, lengths, 0, together=ALONE)
    yield "prefill", prefill(stage, sizes.chunk, 0)
    yield "prefill_of_a_later_chunk", prefill(stage, sizes.chunk, sizes.chunk)
    yield "prefill_of_a_short_chunk", prefill(stage, sizes.chunk // 64, sizes.chunk // 2)
    yield "prefill_beside_decodes", beside(stage)
    keys = np.full(sizes.rows, sizes.shared + sizes.own)
    apart = decodes(stage, keys, sizes.shared, together=ALONE)
    yield "shared_prefix_apart", apart
    cascade = decodes(stage, keys, sizes.shared, together=GROUPS)
    yield "shared_prefix_together", cascade | {"gain": apart["seconds"] / cascade["seconds"]}
    yield "norm", norm(stage, sizes.chunk, model["hidden_size"])
    yield "gate", gate(stage, sizes.chunk, model["intermediate_size"])
    yield "rotate_and_store", rotate(stage, sizes.chunk)
    if stage.has_fp8:
        yield "decode_over_fp8", decodes(stage, np.full(sizes.rows, sizes.keys), 0, together=ALONE, kept=ELEMENT)
        yield "prefill_of_a_later_chunk_over_fp8", prefill(stage, sizes.chunk, sizes.chunk, kept=ELEMENT)
        yield "rotate_and_store_fp8", rotate(stage, sizes.chunk, kept=ELEMENT)
    gains = gains_of_groups(stage)
    yield "gain_of_groups", {f"{rows} x {tokens}": gain for (rows, tokens), gain in gains.items()}


def beside(stage: Stage) -> dict[str, float]:
    """A chunk and decodes in one step: side by side, by launches of any step, and what both take in turn."""
    sizes = stage.sizes
    starts = np.array([sizes.keys - 1] * (sizes.rows // 4) + [sizes.chunk // 2])
    counts = np.array([1] * (sizes.rows // 4) + [sizes.chunk // 8])
    several = len(starts) - 1
    both = Step(stage, starts, counts, several, 0, together=ALONE)
    as_any = Step(stage, starts, counts, several, 0, together=ALONE, attention=padded)
    apart = (
        Step(stage, starts[:several], counts[:several], several, 0, together=ALONE),
        Step(stage, starts[several:], counts[several:], 0, 0, together=ALONE),
    )
    timed, as_any_seconds = stage.seconds(both.run), stage.seconds(as_any.run)["seconds"]
    in_turn = sum(stage.seconds(step.run)["seconds"] for step in apart)
    return timed | {
        "seconds_in_turn": in_turn,
        "seconds_padded": as_any_seconds,
        "gain": in_turn / timed["seconds"],
        "gain_of_padded": timed["seconds"] / as_any_seconds,
        "error": both.error(stage),
        "error_of_padded": as_any.error(stage),
    }


def gains_of_groups(stage: Stage) -> dict[tuple[int, int], float]:
    """How much faster so many decodes of a prefix of so many tokens are together: where `Groups` should begin."""
    gains = {}
    for rows in (16,) if stage.dry else (8, 16, 32, 64, 128):
        for tokens in (128,) if stage.dry else (128, 256, 512, 1024):
            keys = np.full(rows, tokens + stage.sizes.own)
            apart = recorded(stage, keys, tokens, together=ALONE)
            gains[rows, tokens] = apart / recorded(stage, keys, tokens, together=Groups(rows, tokens))
    return gains


def recorded(stage: Stage, keys: NDArray[Any], shared: int, *, together: Groups) -> float:
    """Seconds of few decodes, recorded, since launches take longer, and over more pages than caches hold."""
    model = stage.sizes.model
    needed = 4 * model["num_key_value_heads"] * model["head_dim"] * int(keys.sum() - (len(keys) - 1) * shared)
    copies = 1 if stage.dry else -(-BEYOND_CACHES // needed)
    once = np.ones(len(keys), np.int32)
    steps = [Step(stage, keys - 1, once, len(keys), shared, together=together) for _ in range(copies)]

    def work() -> None:
        for step in steps:
            step.run()

    return stage.seconds(work if stage.dry else GraphRecorder().record(work))["seconds"] / copies


def spec_of(stage: Stage) -> AttentionSpec:
    """The attention of the model."""
    model = stage.sizes.model
    width: int = model["head_dim"]
    return AttentionSpec(0, model["num_attention_heads"], model["num_key_value_heads"], width, width**-0.5, 0, 0.0)


class Step:
    """A step's attention over pages of random numbers, of type `kept`.

    Of its sequences the first share pages of `shared` tokens.
    """

    def __init__(
        self,
        stage: Stage,
        starts: NDArray[Any],
        counts: NDArray[Any],
        decodes: int,
        shared: int,
        *,
        together: Groups,
        attention: Attention = TritonAttention,
        kept: torch.dtype = torch.bfloat16,
    ) -> None:
        self.spec = spec_of(stage)
        self.starts, self.counts = starts.astype(np.int32), counts.astype(np.int32)
        blocks = -(-(self.starts + self.counts) // PAGE)
        self.tables = np.zeros((len(starts), int(blocks.max())), np.int32)
        pages = np.random.default_rng(0).permutation(int(blocks.sum())).astype(np.int32)
        at = 0
        for row, need in zip(self.tables, blocks, strict=True):
            row[:need] = pages[at : at + need]
            row[: shared // PAGE] = self.tables[0, : shared // PAGE]
            at += need
        shape = (len(pages), self.spec.heads, PAGE, self.spec.width)
        self.keys, self.values = stage.random(*shape, dtype=kept), stage.random(*shape, dtype=kept)
        self.query = stage.random(int(self.counts.sum()), self.spec.query_heads * self.spec.width)
        self.backend = attention(stage.device, together)
        slots = np.arange(len(starts), dtype=np.int32)
        self.plan = self.backend.plan(
            BatchLayout(self.tables, slots, self.starts, self.counts, decodes), self.spec, PAGE
        )
        self.tensors = [stage.there(array) for array in self.plan.uploaded]

    def run(self) -> torch.Tensor:
        """Attend."""
        return self.backend.attend(self.spec, self.query, self.keys, self.values, self.plan, self.tensors)

    def error(self, stage: Stage) -> float:
        """Of some of its sequences, relative to float64."""
        first = np.concatenate(([0], np.cumsum(self.counts)))
        got = self.run()
        some = range(0, len(self.starts), max(1, len(self.starts) // 8))
        errors = []
        for i in some:
            rows = slice(first[i], min(first[i + 1], first[i] + 64))
            count = rows.stop - rows.start
            query = self.query[rows].view(count, self.spec.query_heads, self.spec.width)
            expected = reference.attend(
                query,
                self.keys,
                self.values,
                stage.there(self.tables[i : i + 1]),
                [int(self.starts[i])],
                [count],
                scale=self.spec.scale,
            ).flatten(1)
            errors.append(float((got[rows].double() - expected).norm() / expected.norm()))
        return max(errors)


def decodes(
    stage: Stage, keys: NDArray[Any], shared: int, *, together: Groups, kept: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Rows of so many keys each. The share is of the bytes that are needed, shared ones counted for each row."""
    step = Step(stage, keys - 1, np.ones(len(keys), np.int32), len(keys), shared, together=together, kept=kept)
    timed = stage.seconds(step.run)
    needed = 2 * kept.itemsize * step.spec.heads * step.spec.width * float(keys.sum())
    return timed | {
        "share_of_bandwidth": needed / timed["seconds"] / stage.ceilings.bandwidth,
        "error": step.error(stage),
    }


def prefill(stage: Stage, tokens: int, before: int, *, kept: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """One sequence's chunk, with so many tokens before it. The share is of causal attention's products."""
    step = Step(stage, np.array([before]), np.array([tokens]), 0, 0, together=ALONE, kept=kept)
    timed = stage.seconds(step.run)
    pairs = tokens * before + tokens * (tokens + 1) / 2
    flops = 4.0 * step.spec.query_heads * step.spec.width * pairs
    return timed | {"share_of_rate": flops / timed["seconds"] / stage.ceilings.compute, "error": step.error(stage)}


def norm(stage: Stage, rows: int, width: int) -> dict[str, float]:
    """RMSNorm."""
    x, weight = stage.random(rows, width), torch.ones(width, device=stage.device)
    out = torch.empty_like(x)
    timed = stage.seconds(lambda: triton_fused.normalize(x, weight, 1e-5, out))
    return timed | {"share_of_bandwidth": 2 * x.nbytes / timed["seconds"] / stage.ceilings.bandwidth}


def gate(stage: Stage, rows: int, width: int) -> dict[str, float]:
    """SiLU of one half times the other."""
    x = stage.random(rows, 2 * width)
    out = x.new_empty(rows, width)
    timed = stage.seconds(lambda: triton_fused.gate(x, SILU, out))
    return timed | {"share_of_bandwidth": 1.5 * x.nbytes / timed["seconds"] / stage.ceilings.bandwidth}


def rotate(stage: Stage, tokens: int, *, kept: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Rotary embedding, with keys and values into pages."""
    spec = spec_of(stage)
    packed = stage.random(tokens, (spec.query_heads + 2 * spec.heads) * spec.width)
    query = packed.new_empty(tokens, spec.query_heads * spec.width)
    angles = stage.random(tokens, spec.width)
    shape = (-(-tokens // PAGE), spec.heads, PAGE, spec.width)
    keys, values = stage.random(*shape, dtype=kept), stage.random(*shape, dtype=kept)
    places = torch.arange(tokens, dtype=torch.int32, device=stage.device)
    timed = stage.seconds(
        lambda: triton_fused.rotate_and_store(packed, query, angles, angles, None, None, 0.0, places, keys, values)
    )
    moved = packed.nbytes + query.nbytes + kept.itemsize * tokens * 2 * spec.heads * spec.width
    return timed | {"share_of_bandwidth": moved / timed["seconds"] / stage.ceilings.bandwidth}
