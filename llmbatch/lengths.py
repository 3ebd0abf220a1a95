"""Output-length distributions over the tree: survival tables with censoring.

Idea. BlendServe 5.1 gives each subtree the mean length of a sample. Decode memory grows with the square of
the length, so a mean is wrong by a factor: what is needed is a distribution. Here a *table* is kept for the
shard, for each key (what else tells rows apart: sampling parameters, prompt-length bin) and for each subtree
that is large enough. Tables form a tree of their own; a row belongs to the deepest one around it. A table
counts, per bin of lengths, the answers that ended there and those last seen running there. Finished answers
are events, running ones and those cut by `max_tokens` are censored (Kaplan and Meier, 1958), so a half-run
sample is not biased to the short.

Survival. In bin b the hazard is h = (ended + k q) / (at risk + k), at risk being those that ended in b or got
beyond it. Where fewer than 20 answers are complete, q is the parent's hazard and k = 4 (1 - complete / 20)
rows' worth: few answers lean on the parent, enough stand alone, and an MMLU group is not given its
neighbours' essays. With 20 or more, q is the table's own Pareto tail, and k is a quarter row, used only where
nobody seen got beyond the bin: its exponent is the censored maximum-likelihood estimate over the longest 5
answers or sqrt(n) (Hill, 1975), started from 2 and kept within 2 to 4, since below 2 the cap alone would set
E[d^2]. The root leans on a prior: P(D > o) = 256 / (256 + o), half of the answers within 256 tokens and a
tail that `max_tokens` cuts; nothing observed, that is what every row gets.

From survival S follow E[min(D, cap)] = sum S(o) and E[min(D, cap)^2] = sum (2 o + 1) S(o) over o < cap, and
what a running row has left, E[min(D, cap) - o | D > o]. Partial sums at the bins' edges make each of them
one lookup.

Bins. One width cannot serve answers of 2 and of 70,000 tokens. Bins are one token wide up to 16, then a
sixteenth of their octave: 64 tokens at 1,024. Errors within a bin stay near 6 % of the length and a table
near 200 bins. Where at most 16 caps occur they are edges too: rows that exhaust `max_tokens` are then exact.

Sampling. Rows to run first are drawn per table: 1 %, at least 20 of a large one, a few of a small one, never
more than a quarter. They are spread over the table by a golden-ratio sequence, but taken as runs of
neighbours: when a small group shares most of its prompt, running one row of each group would compute every
such prefix now and, under a small pool, again later. Whole groups pay for their prefix once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.tree import PrefixTree

Floats = NDArray[np.float64]

_LARGE = 64  # a subtree with 1 / 64 of the rows is large
_MOST_TABLES = 4096
_MOST_KEYS = 64
_SHORT = 4  # max_tokens up to which the prior is close enough: running such rows first would only cost sharing
_ENOUGH = 20  # answers that need no parent
_PRIOR_MEDIAN = 256.0


class Expected(NamedTuple):
    """Moments of the output lengths of some requests, each capped by its `max_tokens`."""

    mean: Floats
    second_moment: Floats  # E[length^2]


class LengthModel:
    """What is known of the output lengths of a shard's requests; requests are numbered as the tree's rows.

    `max_tokens` int32 by row, `keys` int32 by row (equal keys may share a distribution), `known` int32 by
    row: the exact length where known beforehand, 0 elsewhere. Rows with `max_tokens` 1 are always known.
    """

    def __init__(
        self,
        tree: PrefixTree,
        max_tokens: NDArray[np.int32],
        *,
        keys: NDArray[np.int32] | None = None,
        known: NDArray[np.int32] | None = None,
    ) -> None:
        if len(tree) and int(max_tokens.min()) < 1:
            raise ParameterError(f"max_tokens must be at least 1, and the least given is {int(max_tokens.min())}.")
        self._tree = tree
        self._cap = max_tokens
        self.known = np.where(
            max_tokens == 1, np.int32(1), np.int32(0) if known is None else np.minimum(known, max_tokens)
        )
        self._edges = _edges(max_tokens)
        self.table_of, self._parent = _tables(tree, np.zeros(max_tokens.size, np.int32) if keys is None else keys)
        tables, bins = self._parent.size, self._edges.size - 1
        self._ended = np.zeros((tables, bins), np.int32)
        self._censored = np.zeros((tables, bins + 1), np.int32)  # the last column: got beyond the last bin
        self._answered = np.zeros(tables, np.int32)
        self._event_bin = np.full(max_tokens.size, -1, np.int16)
        self._censored_bin = np.full(max_tokens.size, -1, np.int16)
        self._exhausted = np.zeros(max_tokens.size, np.bool_)
        # Survival at each edge, and sums of S(o) and (2 o + 1) S(o) up to it.
        self._survival = np.zeros((tables, bins + 1))
        self._sum = np.zeros((tables, bins + 1))
        self._sum2 = np.zeros((tables, bins + 1))
        self.refresh()

    @property
    def num_tables(self) -> int:
        """How many distributions are told apart."""
        return self._parent.size

    def observe(self, requests: NDArray[np.int32], generated: NDArray[np.int32], finished: NDArray[np.bool_]) -> None:
        """Note how many tokens each request has generated and whether it has finished; replaces what was noted before.

        Takes effect at the next `refresh`. Requests of known length and with nothing generated teach nothing.
        """
        _observe(
            requests, generated, finished, self.known, self._cap, self.table_of, self._edges,
            self._ended, self._censored, self._answered, self._event_bin, self._censored_bin, self._exhausted,
        )  # fmt: skip

    def refresh(self) -> None:
        """Recompute the tables from what was observed: one pass up, one down, linear in tables x bins."""
        _refresh(
            self._parent, self._edges, self._ended, self._censored, self._answered,
            self._survival, self._sum, self._sum2,
        )  # fmt: skip

    def expected(self, requests: NDArray[np.int32]) -> Expected:
        """Mean and second moment of the output lengths of waiting requests, float64 each."""
        table, cap = self.table_of[requests], self._cap[requests].astype(np.int64)
        _, mean, second = self._upto(table, cap)
        known = self.known[requests].astype(np.float64)
        return Expected(np.where(known > 0, known, mean), np.where(known > 0, known**2, second))

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Floats:
        """Expected further tokens of running requests, float64: at least 1 below `max_tokens`, 0 from there on."""
        table, cap = self.table_of[requests], self._cap[requests].astype(np.int64)
        done = np.minimum(generated, cap)
        survival, before, _ = self._upto(table, done)
        left = (self._upto(table, cap)[1] - before) / survival
        known = self.known[requests]
        left = np.where(known > 0, known - done, left)
        return np.where(done < cap, np.maximum(left, 1.0), 0.0)

    def _upto(self, table: NDArray[np.int32], x: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """S(x), and the sums of S(o) and (2 o + 1) S(o) over o < x; S falls linearly within a bin."""
        b = np.minimum(np.searchsorted(self._edges, x, side="right") - 1, self._edges.size - 2)
        low = self._edges[b]
        j = (x - low).astype(np.float64)
        s = self._survival[table, b]
        slope = (s - self._survival[table, b + 1]) / (self._edges[b + 1] - low)
        pairs = j * (j - 1) / 2
        squares = pairs * (2 * j - 1) / 3
        total = self._sum[table, b] + j * s - slope * pairs
        total2 = self._sum2[table, b] + s * ((2 * low + 1) * j + 2 * pairs)
        return s - slope * j, total, total2 - slope * ((2 * low + 1) * pairs + 2 * squares)

    def choose_sample(self, *, fraction: float = 0.01, floor: int = 20, seed: int = 0) -> NDArray[np.int32]:
        """Rows to run first, in tree order, int32: `fraction` of each table, at least `floor` of a large one.

        Rows of known length or of a few tokens at most are never chosen, nor those already observed.
        """
        rows = self._tree.rows
        free = (
            (self._cap[rows] > _SHORT)
            & (self.known[rows] == 0)
            & (self._event_bin[rows] < 0)
            & (self._censored_bin[rows] < 0)
        )
        position = np.flatnonzero(free).astype(np.int32)
        table = self.table_of[rows[position]]
        position = position[np.argsort(table, kind="stable")]
        bounds = np.zeros(self.num_tables + 1, np.int64)
        np.cumsum(np.bincount(table, minlength=self.num_tables), out=bounds[1:])
        size = np.diff(bounds)
        scaled = np.ceil(floor * size * (_LARGE / max(1, rows.size)))
        least = np.minimum(np.clip(scaled, min(3, floor), floor), np.ceil(size / 4))
        quota = np.maximum(np.ceil(fraction * size), least).astype(np.int64)
        start = np.random.default_rng(seed).random(self.num_tables)
        ends = self._tree.lengths[rows]
        chosen = _choose(position, bounds, np.minimum(quota, size), start, self._tree.lcp, ends)
        sample: NDArray[np.int32] = rows[chosen]
        return sample


def _edges(max_tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Edges of the bins: e[b] < D <= e[b + 1], from 0 to the largest cap."""
    most = int(max_tokens.max()) if max_tokens.size else 1
    edges = list(range(17))
    while edges[-1] < most:
        edges.append(edges[-1] + (1 << max(0, int(math.log2(edges[-1])) - 4)))
    caps = np.unique(max_tokens)
    if caps.size <= 16:
        edges.extend(caps.tolist())
    grid = np.unique(np.array(edges, np.int64))
    return grid[: int(np.searchsorted(grid, most)) + 1]


def _tables(tree: PrefixTree, keys: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The table of each row, and the parent of each table (always before it; the root's is -1).

    A subtree gets a table where it holds 1 / 2,048 of the rows, 32 at least, and an eighth of that lies
    outside it but inside the table above: a bounded number, however the tree nests.
    """
    kinds, kind_of, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if kinds.size > _MOST_KEYS:  # the rare ones share one kind
        rank = np.empty(kinds.size, np.int64)
        rank[np.argsort(-counts, kind="stable")] = np.arange(kinds.size)
        kind_of = np.minimum(rank, _MOST_KEYS - 1)[kind_of]
    count = int(min(kinds.size, _MOST_KEYS))
    table_of = np.zeros(keys.size, np.int32)
    parent = np.full(_MOST_TABLES, -1, np.int32)
    size = np.zeros(_MOST_TABLES, np.int64)
    least = max(32, len(tree) // 2048)
    made = 1
    kind_of = kind_of.astype(np.int32)
    for kind in range(count):
        above = 0
        if count > 1:
            parent[made], above = 0, made
            made += 1
        made = _subtrees(
            tree.rows, tree.leaf, tree.parent, tree.first, tree.last, kind_of, kind, above, least,
            made, count - kind - 1, table_of, parent, size,
        )  # fmt: skip
    return table_of, parent[:made].copy()


@njit(cache=True)
def _subtrees(
    rows: Any, leaf: Any, node_parent: Any, first: Any, last: Any, kind_of: Any, kind: int, above: int, least: int,
    made: int, reserved: int, table_of: Any, parent: Any, size: Any,
) -> int:  # fmt: skip
    """Make the tables of one kind below table `above`, and say which of them each of its rows is in."""
    before = np.zeros(rows.size + 1, np.int64)
    for i in range(rows.size):
        before[i + 1] = before[i] + (kind_of[rows[i]] == kind)
    size[above] = before[rows.size]
    table = np.empty(node_parent.size, np.int32)
    table[0] = above
    for v in range(1, node_parent.size):
        around = table[node_parent[v]]
        inside = before[last[v]] - before[first[v]]
        table[v] = around
        if inside >= least and size[around] - inside >= least // 8 and made + reserved < parent.size:
            parent[made], size[made], table[v] = around, inside, made
            made += 1
    for i in range(rows.size):
        if kind_of[rows[i]] == kind:
            table_of[rows[i]] = table[leaf[i]]
    return made


@njit(cache=True)
def _observe(
    requests: Any, generated: Any, finished: Any, known: Any, cap: Any, table_of: Any, edges: Any,
    ended: Any, censored: Any, answered: Any, event_bin: Any, censored_bin: Any, exhausted: Any,
) -> None:  # fmt: skip
    for i in range(requests.size):
        r = requests[i]
        if known[r] > 0:
            continue
        t = table_of[r]
        if event_bin[r] >= 0:
            ended[t, event_bin[r]] -= 1
            answered[t] -= 1
        if censored_bin[r] >= 0:
            censored[t, censored_bin[r]] -= 1
            answered[t] -= exhausted[r]
        event_bin[r], censored_bin[r], exhausted[r] = -1, -1, False
        tokens = min(generated[i], cap[r])
        if tokens <= 0:
            continue
        if finished[i] and tokens < cap[r]:
            b = _bin(edges, tokens)
            event_bin[r] = b
            ended[t, b] += 1
            answered[t] += 1
        else:
            b = _bin(edges, tokens + 1)  # the bin of the first token that is not known of
            censored_bin[r] = b
            censored[t, b] += 1
            if finished[i]:
                exhausted[r] = True
                answered[t] += 1


@njit(cache=True)
def _bin(edges: Any, tokens: int) -> int:
    """The bin b with edges[b] < tokens <= edges[b + 1]; the number of bins beyond the last."""
    low, high = 0, edges.size
    while low < high:
        middle = (low + high) // 2
        if edges[middle] < tokens:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(cache=True)
def _refresh(
    parent: Any, edges: Any, own_ended: Any, own_censored: Any, own_answered: Any,
    survival: Any, total: Any, total2: Any,
) -> None:  # fmt: skip
    tables, bins = own_ended.shape
    ended, censored, answered = own_ended.copy(), own_censored.copy(), own_answered.copy()
    for t in range(tables - 1, 0, -1):
        answered[parent[t]] += answered[t]
        for b in range(bins):
            ended[parent[t], b] += ended[t, b]
        for b in range(bins + 1):
            censored[parent[t], b] += censored[t, b]
    hazard = np.empty((tables, bins))
    for t in range(tables):
        risk = np.empty(bins, np.int64)  # ended in the bin, or got beyond it
        beyond = np.int64(censored[t, bins])
        for b in range(bins - 1, -1, -1):
            risk[b] = ended[t, b] + beyond
            beyond += ended[t, b] + censored[t, b]
        alone = answered[t] >= _ENOUGH
        steps, exposure = 2.0, 1.0
        if alone:
            wanted = max(5.0, math.sqrt(ended[t].sum()))
            for b in range(bins - 1, -1, -1):
                steps += ended[t, b]
                exposure += (risk[b] - ended[t, b] / 2) * math.log((edges[b + 1] + 1) / (edges[b] + 1))
                if steps >= wanted + 2.0:
                    break
        exponent = min(max(steps / exposure, 2.0), 4.0)
        s, sum1, sum2 = 1.0, 0.0, 0.0
        for b in range(bins):
            low, high = edges[b], edges[b + 1]
            if alone:
                lean = 0.25 if risk[b] == ended[t, b] else 0.0
                q = 1.0 - ((low + 1) / (high + 1)) ** exponent
            else:
                lean = 4.0 * (1.0 - answered[t] / _ENOUGH)
                q = hazard[parent[t], b] if t > 0 else 1.0 - (_PRIOR_MEDIAN + low) / (_PRIOR_MEDIAN + high)
            hazard[t, b] = (ended[t, b] + lean * q) / (risk[b] + lean)
            survival[t, b], total[t, b], total2[t, b] = s, sum1, sum2
            width = float(high - low)
            slope = s * hazard[t, b] / width
            pairs = width * (width - 1) / 2
            squares = pairs * (2 * width - 1) / 3
            sum1 += width * s - slope * pairs
            sum2 += s * ((2 * low + 1) * width + 2 * pairs) - slope * ((2 * low + 1) * pairs + 2 * squares)
            s *= 1.0 - hazard[t, b]
        survival[t, bins], total[t, bins], total2[t, bins] = s, sum1, sum2


@njit(cache=True)
def _choose(position: Any, bounds: Any, quota: Any, start: Any, lcp: Any, ends: Any) -> Any:
    """Sorted positions chosen: `quota` of each table's positions, as runs of rows that share half a prompt."""
    taken = np.zeros(lcp.size, np.bool_)
    for t in range(quota.size):
        low, high = bounds[t], bounds[t + 1]
        most = min(32, max(1, quota[t] // 4))
        left = quota[t]
        u = start[t]
        while left > 0:
            u = (u + 0.6180339887498949) % 1.0
            k = low + min(np.int64(u * (high - low)), high - low - 1)
            while taken[position[k]]:
                k = k + 1 if k + 1 < high else low
            half = ends[position[k]] // 2
            head = k  # where a group no larger than a run begins
            while (
                head > low
                and k - head < most - 1
                and _follows(position, lcp, head, half)
                and not taken[position[head - 1]]
            ):
                head -= 1
            size = 0
            while left > 0 and size < most and head < high and not taken[position[head]]:
                if size and not _follows(position, lcp, head, half):
                    break
                taken[position[head]] = True
                size += 1
                left -= 1
                head += 1
    return np.flatnonzero(taken)


@njit(cache=True)
def _follows(position: Any, lcp: Any, k: int, half: int) -> bool:
    """Whether the k-th free position and the one before are neighbours that share at least `half` tokens."""
    return half > 0 and position[k] == position[k - 1] + 1 and lcp[position[k]] >= half
