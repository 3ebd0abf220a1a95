"""Seconds and memory of building the tree and planning, for short prompts and for long ones that share prefixes.

    python benchmarks/scheduler/plan.py [--short N] [--long N] [--long-tokens T]

Prints one line a workload; the peak is the process's, and each workload runs in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import numpy as np
from numpy.typing import NDArray

from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.pilot_sample import first_sample
from llmbatch.planning.plan import plan
from llmbatch.planning.prefix_tree import PrefixTree

Prompts = tuple[NDArray[np.int32], NDArray[np.int64]]


def short_prompts(n: int) -> Prompts:
    """`n` prompts of 4 to 19 tokens, words drawn by Zipf's law."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 20, n)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.minimum(rng.zipf(1.3, int(offsets[-1])), 50_000).astype(np.int32), offsets


def shared_prompts(n: int, tokens: int) -> Prompts:
    """`n` prompts of `tokens` tokens in all, shuffled groups of 20 that share two thirds of theirs."""
    rng = np.random.default_rng(0)
    length = max(3, tokens // n)
    prefix = 2 * length // 3
    flat = rng.integers(0, 50_000, n * length, dtype=np.int32)
    prompts = flat.reshape(n, length)
    group = rng.permutation(n) // 20
    start = np.unique(group, return_index=True)[1]
    for i in range(n):
        prompts[i, :prefix] = prompts[start[group[i]], :prefix]
    return flat, np.arange(n + 1, dtype=np.int64) * length


def measure(name: str, prompts: Prompts) -> None:
    """Build, sample, estimate and plan once; print a line."""
    tokens, offsets = prompts
    n = len(offsets) - 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    tree = PrefixTree.build(tokens, offsets)
    built = time.perf_counter()
    max_tokens = np.full(n, 4096, np.int32)
    lengths = LengthModel(tree, max_tokens)
    rows = first_sample(lengths, tree)
    generated = np.where(rows % 5 == 0, 2000, 3).astype(np.int32)
    lengths.observe(rows, generated, np.ones(rows.size, np.bool_))
    lengths.refresh()
    expected = lengths.expected(np.arange(n, dtype=np.int32))
    estimated = time.perf_counter()
    cost = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
    decided = plan(tree, expected, cost, max_tokens=max_tokens, pool_tokens=457_763, max_running=4096)
    planned = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{name}: {n:,} prompts, {tokens.size:,} tokens, {tree.num_nodes:,} nodes; build {built - start:.2f} s, "
        f"lengths {estimated - built:.2f} s, plan {planned - estimated:.2f} s, sum {planned - start:.2f} s; "
        f"peak {peak / 2**10:,.0f} MiB ({before / 2**10:,.0f} before, tokens {tokens.nbytes / 2**20:,.0f}); "
        f"sharing {decided.sharing_kept:.4f} of {decided.sharing_possible:.4f}"
    )


def short_case(n: int) -> None:
    """The workload of short prompts."""
    measure("warm-up", short_prompts(1_000))
    measure("short", short_prompts(n))


def long_case(n: int, tokens: int) -> None:
    """The workload of long prompts with shared prefixes."""
    measure("warm-up", shared_prompts(1_000, 10_000))
    measure("long", shared_prompts(n, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=100_000, help="short prompts")
    parser.add_argument("--long", type=int, default=10_000, help="long prompts")
    parser.add_argument("--long-tokens", type=int, default=12_000_000, help="their tokens in all")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for case, sizes in ((short_case, (options.short,)), (long_case, (options.long, options.long_tokens))):
        process = spawn.Process(target=case, args=sizes)
        process.start()
        process.join()


if __name__ == "__main__":
    main()
