"""Random workloads for the tests of scheduler and pages, with lengths the scheduler does not know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmbatch.kvcache.page_trie import PageTrie
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.hardware import find_hardware
from llmbatch.perf_model.shape import find_shape
from llmbatch.perf_model.work import Rates
from llmbatch.planning.equal_prompts import EqualPrompts
from llmbatch.planning.lengths import Expected
from llmbatch.planning.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Workload:
    """Prompts as lists of small token ids, the tokens each generates, and what is believed of them."""

    prompts: list[list[int]]
    lengths: NDArray[np.int32]
    believed: NDArray[np.float64]

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        return np.array([len(prompt) for prompt in self.prompts], np.int32)

    def room(self, page_size: int) -> int:
        """Pages for all requests at once, as long as they are and as they are believed to be."""
        lengths = np.maximum(self.lengths, np.ceil(self.believed).astype(np.int64))
        return int((-(-(self.prompt_lengths + lengths) // page_size)).sum())

    @cached_property
    def contents(self) -> list[NDArray[np.int64]]:
        """What stands at each position of each request: the prompt, then what equal prompts have in common."""
        found = []
        for prompt, length in zip(self.prompts, self.lengths.tolist(), strict=True):
            answer = 1000 + 100 * hash(tuple(prompt)) % 997 + len(prompt) + np.arange(length)
            found.append(np.concatenate((np.array(prompt, np.int64), answer)))
        return found

    def trie(self, page_size: int) -> PageTrie:
        rows = sorted(range(len(self.prompts)), key=self.prompts.__getitem__)
        ordered = [self.prompts[row] for row in rows]
        lcp = [0] + [common(a, b) for a, b in pairwise(ordered)]
        return PageTrie.build(np.array(rows, np.int32), np.array(lcp, np.int32), page_size, len(self.prompts))

    def equal(self) -> EqualPrompts:
        flat = np.concatenate([np.array(prompt, np.int32) for prompt in self.prompts])
        offsets = np.concatenate(([0], np.cumsum(self.prompt_lengths))).astype(np.int64)
        return EqualPrompts.of(PrefixTree.build(flat, offsets), len(self.prompts))


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Believed:
    """Lengths that stay wrong: what is believed less what was generated, at least one token."""

    def __init__(self, believed: NDArray[np.float64]) -> None:
        self._believed = believed

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Expected:
        left = np.maximum(self._believed[requests] - generated, 1.0)
        return Expected(left, left**2)


COST = CostModel(find_shape("llama-3-8b"), find_hardware("a100-80gb"))
RATES = Rates(
    seconds_per_token=1e-3,
    seconds_per_sample=0.0,
    seconds_per_pair=1e-6,
    seconds_per_kv_token=1e-5,
    weight_seconds=5e-3,
    weights_share_memory=False,
)


@st.composite
def workloads(draw: st.DrawFn, *, most: int = 24) -> Workload:
    """Prompts that share prefixes often, a few equal ones among them; beliefs up to ten times off."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(1, most))
    groups = draw(st.integers(1, 4))
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, 3, rng.integers(0, 40)).tolist() for _ in range(groups)]
    prompts = []
    for _ in range(count):
        prompt = prefixes[rng.integers(groups)] + rng.integers(0, 3, rng.integers(0, 12)).tolist()
        prompts.append(prompt or [0])
    lengths = rng.integers(1, rng.integers(2, 60), count).astype(np.int32)
    believed = lengths * rng.uniform(0.1, 10.0, count)
    return Workload(prompts, lengths, believed)
