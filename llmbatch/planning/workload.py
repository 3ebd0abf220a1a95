"""The input of a plan and a run: a prefix tree, the knowledge of lengths, and the pool and policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.arguments import INT32_MAX
from llmbatch.errors import ParameterError, RowError
from llmbatch.kvcache.contents import Prompts
from llmbatch.kvcache.windows import NO_WINDOWS, WindowPages
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.cascade import tokens_together
from llmbatch.planning.lengths import LengthModel
from llmbatch.planning.order import Policy
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.preprocess.request_batch import RequestBatch

ROW_TOKENS: Final = 1024  # that a row is taken to hold, where memory is split before rows are known
# Of a pool that is asked for and holds nothing: several times what a node has, and planned for within seconds.
_MOST_PAGES: Final = 1 << 24
_STEP: Final = 2048  # tokens of prompts that a step computes, about
_LOST: Final = 1e-6  # of a page, more than sums of floats lose


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory a shard may use: pages, and window pages for layers with windows, if these have their own."""

    num_pages: int
    page_size: int
    windows: WindowPages = NO_WINDOWS

    @classmethod
    def of(
        cls, memory: float, page_size: int, bytes_per_token: float, *, window_bytes: float, window: int, most: int
    ) -> Pool:
        """Make the pages of so many bytes of memory, `bytes_per_token` each token.

        Where `window_bytes` of these are of layers that keep `window` tokens, memory is split so that both kinds of
        pages run out together if rows hold `ROW_TOKENS` tokens, or two windows, if that is more; and the `most` that
        they may have, if that is less or if pages take no memory.
        """
        whole = cls(int(memory // bytes_per_token) // page_size, page_size)
        if window_bytes == 0:
            return whole
        tokens = most if window_bytes == bytes_per_token else min(most, max(ROW_TOKENS, 2 * window))
        windows = WindowPages(window, whole.num_pages, window_bytes / bytes_per_token)
        return replace(whole, windows=windows).split((window + 2 * page_size) / tokens)

    def split(self, ratio: float) -> Pool:
        """Split the memory anew, so that there are `ratio` window pages for each page.

        Pages hold all layers if that is 1 or more, or the memory holds less than two windows.
        """
        windows, size = self.windows, self.page_size
        memory = self.whole_tokens / size  # in pages that hold all layers
        whole = Pool(int(memory + _LOST), size)
        if ratio >= 1.0:
            return whole
        num_pages = int(memory / (1.0 - windows.share + ratio * windows.share) + _LOST)
        window_pages = int((memory - num_pages * (1.0 - windows.share)) / windows.share + _LOST)
        if window_pages < 2 * (windows.tokens // size + 2):
            return whole
        return Pool(num_pages, size, windows._replace(num_pages=window_pages))

    def times(self, devices: int) -> Pool:
        """Return the pool of so many devices that share each row."""
        windows = self.windows._replace(num_pages=self.windows.num_pages * devices)
        return Pool(self.num_pages * devices, self.page_size, windows)

    def at_most(self, pages: int) -> Pool:
        """Return the pool without the pages, of either kind, that are more than so many."""
        windows = self.windows._replace(num_pages=min(self.windows.num_pages, pages))
        return Pool(min(self.num_pages, pages), self.page_size, windows)

    @property
    def tokens(self) -> int:
        """The tokens it holds."""
        return self.num_pages * self.page_size

    @property
    def whole_tokens(self) -> float:
        """The tokens whose KV in all layers takes as much memory; `tokens`, where there are no window pages."""
        windows = self.windows
        return self.tokens * (1.0 - windows.share) + windows.num_pages * self.page_size * windows.share


def check_simulated_pool(pool: Pool, bytes_per_token: float) -> None:
    """Raise ParameterError where a pool that nothing is held in has far more pages than a device."""
    if pool.num_pages > _MOST_PAGES:
        kv_memory = pool.tokens * bytes_per_token
        raise ParameterError(
            f"kv_memory must hold at most {_MOST_PAGES:,} pages of {pool.page_size} tokens, got {kv_memory:g} bytes, "
            f"which hold {pool.num_pages:,}: name what a device has, or larger pages",
            option="kv_memory",
            value=kv_memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How a shard is ordered and scheduled."""

    order: Policy = "blend"
    step_tokens: int | None = None  # decided in closed loop when None
    max_running: int  # sequences in flight
    seed: int = 0
    sample_fraction: float = 0.01  # of the rows, run first where lengths are not known

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_fraction <= 1.0:
            raise ParameterError(f"sample_fraction must lie in (0, 1], got {self.sample_fraction}")


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows that have been answered before: they are not run, and inform the length model."""

    tree: PrefixTree  # of them and of the rows that are to be run
    generated: NDArray[np.int32]  # by row: tokens of the answer, 0 for rows that are to be run


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as the tree's rows, and the knowledge of their lengths beforehand."""

    tree: PrefixTree  # of the rows that are to be run
    max_tokens: NDArray[np.int32]  # by row
    keys: NDArray[np.int32]  # by row: rows of one key may share a length distribution
    known: NDArray[np.int32]  # by row: the exact length where known, else 0
    examples: Examples | None = None
    prompts: Prompts = field(default_factory=Prompts.nothing)  # by row, where pages are to be found by their tokens
    begun: NDArray[np.int32] | None = None  # by row: last tokens of the prompt that its answer begins with

    @classmethod
    def of(
        cls, requests: RequestBatch, answered: NDArray[np.int32] | None = None, *, tree: PrefixTree | None = None
    ) -> Workload:
        """Build a workload from tokenised requests. If only max_tokens can end an answer, its length is known.

        `answered` int32 [n] are the tokens of earlier answers, 0 for requests that are to be run.
        `tree` is that of the prompts, if it is built already.
        """
        always = np.array([params.ignore_eos and not params.stop for params in requests.params], np.bool_)
        tree = PrefixTree.build(requests.tokens, requests.offsets) if tree is None else tree
        known = np.where(always[requests.params_index], requests.max_tokens, 0).astype(np.int32)
        kinds: dict[tuple[object, ...], int] = {}
        keys = np.array([kinds.setdefault(params.kind, len(kinds)) for params in requests.params], np.int32)
        keys = keys[requests.params_index]
        findable = findable_tokens(requests.scored, requests.prompt_lengths)
        prompts = Prompts(requests.tokens, requests.offsets, findable)
        if answered is None or not answered.any():
            return cls(tree, requests.max_tokens, keys, known, prompts=prompts, begun=requests.begun)
        run = tree.select(answered == 0)
        return cls(run, requests.max_tokens, keys, known, Examples(tree, answered), prompts, requests.begun)

    def __len__(self) -> int:
        """Count the requests, including those outside the tree."""
        return len(self.max_tokens)

    def without(self, rows: Collection[int]) -> Workload:
        """Exclude some rows from running; the others keep their numbers."""
        if not rows:
            return self
        keep = np.ones(len(self), np.bool_)
        keep[list(rows)] = False
        return replace(self, tree=self.tree.select(keep))

    @property
    def tree_with_examples(self) -> PrefixTree:
        """The tree of the rows and the examples."""
        return self.tree if self.examples is None else self.examples.tree

    def length_model(self) -> LengthModel:
        """Build the length model as it is before anything runs."""
        lengths = LengthModel(
            self.tree_with_examples, self.max_tokens, keys=self.keys, known=self.known, begun=self.begun
        )
        if self.examples is not None:
            seen = np.flatnonzero(self.examples.generated).astype(np.int32)
            lengths.observe(seen, self.examples.generated[seen], np.ones(len(seen), np.bool_))
            lengths.refresh()
        return lengths


def work_of(tree: PrefixTree, answers: NDArray[np.float64], cost: CostModel) -> tuple[float, float]:
    """Return compute and memory seconds of a tree's rows, shared prompts computed once (BlendServe 2.4).

    `answers` are the tokens of their answers, by row.
    """
    rows = tree.rows
    prompts, tokens = tree.lengths[rows], answers[rows]
    compute = cost.request_compute(prompts, tokens, tree.lcp).sum()
    memory = cost.request_memory(prompts, tokens, tokens**2, tokens_together(tree, cost)[rows]).sum()
    return float(compute), float(memory)


def findable_tokens(scored: NDArray[np.int32], prompts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Count the leading prompt tokens whose pages may be found (`Prompts.findable`), from `RequestBatch.scored`."""
    return np.where(scored < prompts, scored, INT32_MAX).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Fit:
    """The requests that a pool has room for, and the longest answer of each: one rule for jobs and simulations."""

    max_tokens: NDArray[np.int32]  # [n] most tokens to generate; 1 where the request is refused
    refused: NDArray[np.bool_]  # [n] its prompt leaves no room for an answer
    cut: NDArray[np.bool_]  # [n] its answer may end before the tokens that were asked for

    @classmethod
    def of(cls, prompts: NDArray[np.int32], max_tokens: NDArray[np.int32], pool: Pool) -> Fit:
        """Fit prompts and answers of at most so many tokens: a request that runs alone always ends."""
        room = pool.tokens - prompts.astype(np.int64)
        refused = room < 1
        return cls(np.clip(room, 1, max_tokens).astype(np.int32), refused, ~refused & (room < max_tokens))


def fit_requests(requests: RequestBatch, pool: Pool) -> tuple[RequestBatch, dict[int, RowError], NDArray[np.intp]]:
    """Fit requests into the pool.

    Returns the requests as the pool allows them, the errors of those that cannot run, and those that may end early.
    """
    prompts = requests.prompt_lengths
    fit = Fit.of(prompts, requests.max_tokens, pool)
    errors = {int(i): too_long(prompts[i], pool) for i in np.flatnonzero(fit.refused)}
    recorded = np.minimum(requests.recorded, fit.max_tokens)
    return replace(requests, max_tokens=fit.max_tokens, recorded=recorded), errors, np.flatnonzero(fit.cut)


def too_long(prompt: int, pool: Pool) -> RowError:
    """Word the error of a prompt of so many tokens that leaves no room for an answer."""
    return RowError(
        "too_long",
        f"prompt has {prompt} tokens, the KV pool holds {pool.tokens}, and one is needed for the answer: "
        "raise kv_memory or shorten the prompt",
    )


def early_ends(rows: int, pool: Pool) -> tuple[str, ...]:
    """Word the warning that so many rows may end early."""
    if not rows:
        return ()
    which = "1 row may end" if rows == 1 else f"{rows:,} rows may end"
    return (
        f"{which} early, with finish_reason 'length': prompt and max_tokens need more KV than the {pool.tokens:,} "
        "tokens that the pool holds; raise kv_memory or lower max_tokens",
    )


def split_for(pool: Pool, workload: Workload) -> Pool:
    """Split the memory of a pool between pages and window pages by the rows of a workload.

    Both kinds run out together: they are as the tokens that rows hold, each summed over the steps that its row takes.
    While an answer of a tokens is generated, in a steps, pages hold the prompt and half of the answer in the mean, and
    window pages a window, or all that the row has at its end. A prompt is computed in steps of `_STEP` tokens; each of
    its tokens takes window pages in one of them, beside the window before. Of what rows share of their prompts one has
    all. Returns the pool as it is if it has one kind of pages, or room for all rows at once, or if the split would hold
    a row no more that it holds.
    """
    windows, tree = pool.windows, workload.tree
    if windows.share in (0.0, 1.0) or not len(tree):
        return pool
    rows, most = tree.rows, windows.tokens + 2 * pool.page_size
    answers = workload.length_model().expected(rows).mean
    prompts = tree.lengths[rows] - tree.lcp
    if (prompts + answers).sum() <= pool.tokens:
        return pool
    steps = prompts / _STEP
    held = answers @ (prompts + answers / 2) + steps @ (prompts / 2)
    in_windows = answers @ np.minimum(prompts + answers, most) + steps @ np.minimum(prompts, most) + prompts.sum()
    split = pool.split(float(in_windows / held))
    longest = int((tree.lengths + workload.max_tokens.astype(np.int64))[rows].max())
    return pool if split.tokens < min(longest, pool.tokens) else split
