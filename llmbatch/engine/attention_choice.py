"""The attention kernels that a device runs: the named backend, or the first that works here.

A backend works when a step of every kind of layer of the model agrees with the reference in each token, attended as a
step that is launched and as one that is recorded. Kernels are compiled then, so one that does not compile is known by
its name before the job begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import torch

from llmbatch.errors import ModelError
from llmbatch.kernels import reference
from llmbatch.kernels.interface import BatchLayout, GraphCapturable, PagedAttention
from llmbatch.kernels.spec import AttentionSpec

AttentionName = Literal["auto", "triton", "flash-attn", "varlen"]

# Of the step that is tried: a decode and a chunk so long that their keys are cut, and a prompt of less than a tile.
_STARTS, _COUNTS = (700, 640, 0), (1, 70, 9)
_TOLERANCE: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    # With keys and values of e4m3 products are of float16.
    {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 5e-3}
)


class Unavailable(Exception):
    """A backend cannot be used; the message says why, and what to do about it."""


def _triton(device: torch.device) -> PagedAttention:
    from llmbatch.kernels.triton.backend import TritonAttention

    return TritonAttention(device)


def _flash(device: torch.device) -> PagedAttention:
    from llmbatch.kernels.flash_attn import FlashAttention

    return FlashAttention()


def _varlen(device: torch.device) -> PagedAttention:
    from llmbatch.kernels.torch_varlen import VarlenAttention

    return VarlenAttention()


MAKERS: Final[Mapping[str, Callable[[torch.device], PagedAttention]]] = MappingProxyType(
    {"triton": _triton, "flash-attn": _flash, "varlen": _varlen}
)


def choose_attention(
    name: AttentionName,
    specs: Iterable[AttentionSpec],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    makers: Mapping[str, Callable[[torch.device], PagedAttention]] = MAKERS,
) -> tuple[PagedAttention, tuple[str, ...]]:
    """Choose the backend of that name, or with "auto" the first that works; returns notes on others for the user.

    `dtype` is that of queries and answers, `kv_dtype` of keys and values in pages.
    Raises ModelError if it does not work, or none does.
    """
    kinds = {(spec.kind, spec.width, spec.softcap, spec.sinks is None): spec for spec in specs}
    notes: list[str] = []
    for candidate in makers if name == "auto" else (name,):
        try:
            backend = makers[candidate](device)
            ways = (backend, backend.padded) if isinstance(backend, GraphCapturable) else (backend,)
            for way, spec in product(ways, kinds.values()):
                _try(way, spec, dtype, kv_dtype, device, page_size)
            return backend, tuple(notes)
        except Exception as error:  # whatever a compiler or a library raises
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            if name != "auto":
                raise ModelError(
                    f"attention {name!r} cannot be used here: {reason}; or take attention='auto' (--attention auto)"
                ) from error
            notes.append(f"attention {candidate!r} is not used: {reason}")
    raise ModelError("no attention works here: " + "; ".join(notes))


def _try(
    backend: PagedAttention,
    spec: AttentionSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    page_size: int,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    starts, counts = np.array(_STARTS, np.int32), np.array(_COUNTS, np.int32)
    each = -(-int((starts + counts).max()) // page_size)
    pages = len(starts) * each
    tables = torch.randperm(pages, generator=generator).int().numpy().reshape(len(starts), each)
    layout = BatchLayout(tables, np.arange(len(starts), dtype=np.int32), starts, counts, decodes=1)
    keys, values = (random(pages, spec.heads, page_size, spec.width).to(kv_dtype) for _ in range(2))
    query = random(int(counts.sum()), spec.query_heads * spec.width)
    plan = backend.plan(layout, spec, page_size)
    tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in plan.uploaded]
    got = backend.attend(spec, query, keys, values, plan, tensors)
    expected = reference.attend(
        query.view(len(query), spec.query_heads, spec.width),
        keys,
        values,
        torch.from_numpy(tables).to(device),
        list(_STARTS),
        list(_COUNTS),
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        sinks=spec.sinks,
    )
    wrong = (got.view(expected.shape).double() - expected).flatten(1).norm(dim=1)
    error = float((wrong / expected.flatten(1).norm(dim=1)).max())
    if not error < max(_TOLERANCE[dtype], _TOLERANCE[kv_dtype]):
        raise Unavailable(
            f"of {spec.query_heads} query and {spec.heads} KV heads of {spec.width} elements in "
            f"{str(dtype).removeprefix('torch.')} it gave answers that are wrong by {error:.1e}"
        )
