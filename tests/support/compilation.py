"""Compile kernels for a card that need not be there: `python -m tests.support.compilation CAPABILITY [every]`.

Prints what each takes of a multiprocessor, as JSON. In a process of its own, because what Triton's interpreter runs is
not compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmbatch.kernels.triton import argmax as triton_sampling
from llmbatch.kernels.triton import attention as triton_attention
from llmbatch.kernels.triton import draw as triton_draw
from llmbatch.kernels.triton import fp8 as triton_fp8
from llmbatch.kernels.triton import fused as triton_fused
from llmbatch.kernels.triton import grid as triton_grid
from llmbatch.kernels.triton import merge as triton_merge
from llmbatch.kernels.triton.attention import Launch

FP8 = 89  # the first capability with numbers of e4m3
GROUP = 4  # query heads of a KV head
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
E4M3 = "*fp8e4nv"


class Resources(NamedTuple):
    """What a program of a kernel takes."""

    registers: int  # of a thread
    shared: int  # bytes
    spilled: int  # bytes of a thread: registers in memory, and arrays that are indexed


def resources(made: Any) -> Resources:
    """What a compiled kernel takes, by NVIDIA's own tool."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(made.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return Resources(found["REG"], int(made.metadata.shared), found["STACK"] + found["LOCAL"])


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int | None
) -> Resources:
    """What a kernel takes whose other arguments are of these types."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")},
    )
    options["enable_fp_fusion"] = True
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return resources(made)


def attention_types(dtype: torch.dtype, *, fp8: bool = False) -> dict[str, str]:
    """Types of the arguments of the attention kernels, over pages of `dtype` or of FP8."""
    types = dict.fromkeys(("query", "out", "keys", "values"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("keys", "values"), E4M3) if fp8 else {}
    types |= dict.fromkeys(("partial", "sums", "sinks"), "*fp32")
    types |= dict.fromkeys(("pages", "items", "order", "parts", "count"), "*i32")
    types |= dict.fromkeys(("heads", "query_stride", "window"), "i32")
    return types | dict.fromkeys(("factor", "inner"), "fp32")


def attention_constants(dtype: torch.dtype, width: int, *, every: bool) -> dict[str, Any]:
    """What the attention kernels are compiled for, with products in `dtype`, with `every` feature or none."""
    return {
        "GROUP": GROUP, "WIDTH": width, "PADDED": triton.next_power_of_2(width), "SIZE": 16,
        "CAPPED": every, "WINDOWED": every, "SINKS": every,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "WIDENED": False,
    }  # fmt: skip  # a table


def attention(
    dtype: torch.dtype, width: int, capability: int, *, many: bool, every: bool = False, fp8: bool = False
) -> Resources:
    """The attention kernel, with `every` feature or none, over pages of `dtype` or of FP8."""
    element = torch.float16 if fp8 else dtype
    launch = Launch.of(element, width, GROUP, blocks=many, hopper=capability == 90, e4m3=fp8)
    constants = attention_constants(element, width, every=every)
    constants |= {"BLOCK": launch.block, "TILE": launch.tile, "GATHERED": every and many}
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return compiled(triton_attention._attend, attention_types(dtype, fp8=fp8), constants, capability, **options)


def grid(dtype: torch.dtype, width: int, capability: int, *, every: bool = False, fp8: bool = False) -> Resources:
    """The persistent grid of blocks, with `every` feature or none, over pages of `dtype` or of FP8."""
    element = torch.float16 if fp8 else dtype
    launch = Launch.of(element, width, GROUP, blocks=True, hopper=capability == 90, e4m3=fp8)
    constants = attention_constants(element, width, every=every)
    constants |= {"BLOCK": launch.block, "PER_ITEM": launch.programs, "TILE": launch.tile}
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    return compiled(triton_grid._attend_in_turn, attention_types(dtype, fp8=fp8), constants, capability, **options)


def rotation(capability: int, rotary: int, norms: bool, *, fp8: bool = False) -> Resources:
    """Rotary embedding with the KV write, to pages of bfloat16 or of FP8."""
    types = dict.fromkeys(("packed", "query", "cosine", "sine", "keys", "values"), "*bf16")
    types |= dict.fromkeys(("keys", "values"), E4M3) if fp8 else {}
    types |= {"query_norm": "*fp32", "key_norm": "*fp32", "places": "*i32", "epsilon": "fp32"}
    types |= {"query_heads": "i32", "heads": "i32"}
    constants = {"WIDTH": 128, "PADDED": 128, "ROTARY": rotary, "SIZE": 16, "BLOCK": 8}
    constants |= {"QUERY_NORM": norms, "KEY_NORM": norms}
    return compiled(triton_fused._rotate_and_store, types, constants, capability)


def common(capability: int) -> dict[str, Resources]:
    """What kernels take that most jobs run, of heads of 128 elements in bfloat16."""
    found = {
        f"attend bf16 128 {'many' if many else 'one'}": attention(torch.bfloat16, 128, capability, many=many)
        for many in (False, True)
    }
    found["attend with every feature"] = attention(torch.bfloat16, 80, capability, many=True, every=True)
    found["attend one with every feature"] = attention(torch.bfloat16, 80, capability, many=False, every=True)
    found["grid bf16 128"] = grid(torch.bfloat16, 128, capability)
    out = {"out": "*bf16", "partial": "*fp32", "sums": "*fp32", "parts": "*i32", "merged": "*i32", "sinks": "*fp32"}
    merging = {"WIDTH": 128, "PADDED": 128, "SINKS": True, "HEADS": triton_merge._HEADS}
    types = out | {"query_heads": "i32"}
    found["merge"] = compiled(triton_merge._merge, types, merging, capability, num_warps=triton_merge._WARPS)
    norm = {"x": "*bf16", "out": "*bf16", "weight": "*fp32", "width": "i32", "epsilon": "fp32"}
    found["norm"] = compiled(triton_fused._normalize, norm, {"PADDED": 4096}, capability, num_warps=8)
    gate = {"x": "*bf16", "out": "*bf16", "width": "i32", "total": "i32"}
    found["gate"] = compiled(triton_fused._gate, gate, {"ACTIVATION": 1, "BLOCK": 1024}, capability)
    found["rotate"] = rotation(capability, 128, norms=False)
    found["rotate with norms"] = rotation(capability, 64, norms=True)
    best = {"logits": "*bf16", "tokens": "*i32", "finite": "*i1", "vocabulary": "i32"}
    found["best"] = compiled(triton_sampling._best, best, {"BLOCK": 4096}, capability, num_warps=8)
    types = {"logits": "*bf16", "rows": "*i32", "given": "*fp32", "finite": "*i1", "tokens": "*i32"}
    found["draw"] = compiled(
        triton_draw._draw,
        types | {"vocabulary": "i32"},
        {"BLOCK": triton_draw._BLOCK},
        capability,
        num_warps=triton_draw._WARPS,
    )
    return found


def common_fp8(capability: int) -> dict[str, Resources]:
    """What kernels over pages and weights of FP8 take, of heads of 128 elements."""
    found = {}
    types = {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    for padded in (4096, 32768):
        constants = {"PADDED": padded}
        found[f"quantise {padded}"] = compiled(
            triton_fp8._quantise, types, constants, capability, num_warps=min(16, padded // 512)
        )
    for name, many in (("one", False), ("many", True)):
        found[f"attend e4m3 128 {name}"] = attention(torch.bfloat16, 128, capability, many=many, fp8=True)
    found["rotate to e4m3"] = rotation(capability, 128, norms=False, fp8=True)
    found["rotate to e4m3 with norms"] = rotation(capability, 64, norms=True, fp8=True)
    return found


def others(capability: int) -> dict[str, Resources]:
    """What attention of other heads and numbers takes."""
    found = {
        f"attend {NAMES[dtype]} {width} {'many' if many else 'one'}": attention(dtype, width, capability, many=many)
        for dtype in NAMES
        for width in (64, 128, 256)
        for many in (False, True)
        if (dtype, width) != (torch.bfloat16, 128) and (width == 128 or dtype != torch.float16)
    }
    found |= {
        f"grid {NAMES[dtype]} {width}": grid(dtype, width, capability)
        for dtype in (torch.bfloat16, torch.float32)
        for width in (64, 128, 256)
        if (dtype, width) != (torch.bfloat16, 128)
    }
    found["grid with every feature"] = grid(torch.bfloat16, 80, capability, every=True)
    if capability >= FP8:
        for width in (64, 256):
            for name, many in (("one", False), ("many", True)):
                found[f"attend e4m3 {width} {name}"] = attention(torch.bfloat16, width, capability, many=many, fp8=True)
        found["grid e4m3 128"] = grid(torch.bfloat16, 128, capability, fp8=True)
        for name, many in (("attend e4m3 with", True), ("attend e4m3 one with", False)):
            found[f"{name} every feature"] = attention(torch.bfloat16, 80, capability, many=many, every=True, fp8=True)
    return found


def main(capability: int, *, every: bool) -> dict[str, Resources]:
    """What the kernels of most jobs take, or `every` kernel."""
    found = common(capability)
    if capability >= FP8:
        found |= common_fp8(capability)
    return found | (others(capability) if every else {})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), every="every" in sys.argv)))
