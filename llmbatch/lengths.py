"""Output-length distributions over the tree: survival tables with censoring.

Idea. BlendServe 5.1 gives each subtree the mean length of a sample. Decode memory grows with the square of
the length, so a mean is wrong by a factor: what is needed is a distribution. Here a *table* is kept for the
shard, for each key (what else tells rows apart, as sampling parameters do), for each subtree that is large
enough, and where prefixes tell no further, for each range of prompt lengths. Tables form a tree of their own;
a row belongs to the deepest one around it. A table counts, per bin of lengths, the answers that ended there
and those last seen running there. Finished answers are events, running ones and those cut by `max_tokens` are
censored (Kaplan and Meier, 1958), so a half-run sample is not biased to the short. Observations count in the
tables above as well, each for as many rows as its own table has per observation: a table that was sampled
more than its neighbours does not outweigh them.

Survival. In bin b the hazard is h = (ended + k (A(b) - A(b + 1))) / (at risk + k A(b)). At risk are those that
ended in b or got beyond it, and of each row seen running in b the share of b that it has behind it: where all
run at one place, the few that ended beside them would otherwise be all there were. Where fewer than 20 answers
are complete, k = 4 (1 - complete / 20) rows are taken to follow the distribution A above (a Dirichlet prior:
Susarla and Van Ryzin, 1976): few answers lean on the parent, enough stand alone, and an MMLU group is not given
its neighbours' essays. But a few rows that are still running where all neighbours have long ended are of a kind
not seen before, and the neighbours' tail is no forecast for them. So A is a mixture of the parent's
distribution and the table's own extrapolation, by how likely the parent's and the prior make what the table
has seen, with a thousand to one for the parent at first. With 20 or more, A is the table's own extrapolation,
used only where nobody seen got beyond the bin and then with a quarter row. The prior is P(D > o) =
256 / (256 + o): half of the answers within 256 tokens and a tail that `max_tokens` cuts; nothing observed, that
is what every row gets.

Beyond what was seen. Up to x, where the last of its rows was seen, a table's own extrapolation is the prior;
from there on -d log S / d log o = a (o / x)^(2/3), at most 4. a is the censored maximum-likelihood estimate
over the longest answers (Hill, 1975), started from 2 and kept within 2/3 and 4: over 5 or sqrt(n) of them, and
as many as rows were running still at x. Hill's tail has a constant exponent. Where half of a sample is running,
it would be near 1, and the cap alone would set E[d^2]; held at 2 or more it makes E[d^2] a third of the truth.
The exponents of real answers rise along their tails, as a Weibull distribution's do: in proportion to o if it
is exponential, more slowly if it is heavier.

From survival S follow E[min(D, cap)] = sum S(o) and E[min(D, cap)^2] = sum (2 o + 1) S(o) over o < cap, and
what a running row has left, E[min(D, cap) - o | D > o]. Partial sums at the bins' edges make each of them
one lookup.

Bins. One width cannot serve answers of 2 and of 70,000 tokens. Bins are one token wide up to 16, then a
sixteenth of their octave: 64 tokens at 1,024. Errors within a bin stay near 6 % of the length and a table
near 200 bins. Where at most 16 caps occur they are edges too: rows that exhaust `max_tokens` are then exact.
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

_MOST_TABLES = 4096
_MOST_KEYS = 64
_ENOUGH = 20  # answers that need no parent
_LEAN = 4.0  # rows' worth of the parent where no answer is complete
_NEW_KIND = 1e-3  # odds that a table's rows are of a kind not seen above
_PRIOR_MEDIAN = 256.0
_LEAST_EXPONENT, _MOST_EXPONENT = 2 / 3, 4.0  # of a tail
_STEEPER = 2 / 3  # power of the length with which a tail's exponent rises
_ENDED, _RUNNING, _EXHAUSTED, _TOKENS = range(4)


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
        self.max_tokens = max_tokens
        self.known = np.where(
            max_tokens == 1, np.int32(1), np.int32(0) if known is None else np.minimum(known, max_tokens)
        )
        self.edges = _edges(max_tokens)  # of the bins: e[b] < D <= e[b + 1]
        self.table_of, self.parent = _tables(tree, np.zeros(max_tokens.size, np.int32) if keys is None else keys)
        tables, edges = self.parent.size, self.edges.size
        self._rows = np.bincount(self.table_of[self.known == 0], minlength=tables)
        # Observed rows by what they were last seen doing, and of the censored ones, the tokens they have in their
        # bin. The last column got beyond the last bin.
        self._counts = np.zeros((4, tables, edges), np.int64)
        self._kind = np.full(max_tokens.size, -1, np.int8)
        self._generated = np.zeros(max_tokens.size, np.int32)
        # At each edge: survival S, and the sums of S(o) and (2 o + 1) S(o) up to it.
        self._curve = np.zeros((tables, edges, 3))
        self.refresh()

    @property
    def num_tables(self) -> int:
        """How many distributions are told apart."""
        return self.parent.size

    @property
    def observed(self) -> NDArray[np.bool_]:
        """By row: whether its length, or that it is running still, has been observed."""
        return self._kind >= 0

    @property
    def survival(self) -> Floats:
        """P(D > e) of each table's rows at each of `edges`, caps aside: [tables, edges]."""
        return self._curve[:, :, 0]

    def observe(self, requests: NDArray[np.int32], generated: NDArray[np.int32], finished: NDArray[np.bool_]) -> None:
        """Note how many tokens each request has generated and whether it has finished; replaces what was noted before.

        Takes effect at the next `refresh`. Requests of known length and with nothing generated teach nothing.
        """
        _observe(
            requests, generated, finished, self.known, self.max_tokens, self.table_of, self.edges,
            self._counts, self._kind, self._generated,
        )  # fmt: skip

    def refresh(self) -> None:
        """Recompute the tables from what was observed: one pass up, one down, linear in tables x bins."""
        pooled, answered = _pool(self.parent, self._rows, self._counts)
        _survive(self.parent, self.edges, pooled, answered, self._curve)

    def expected(self, requests: NDArray[np.int32]) -> Expected:
        """Mean and second moment of the output lengths of waiting requests, float64 each."""
        return Expected(*_expected(requests, self.known, self.max_tokens, self.table_of, self.edges, self._curve))

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Floats:
        """Expected further tokens of running requests, float64: at least 1 below `max_tokens`, 0 from there on."""
        left: Floats = _remaining(
            requests, generated, self.known, self.max_tokens, self.table_of, self.edges, self._curve
        )
        return left


def _edges(max_tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Edges of the bins, from 0 to the largest cap."""
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
    outside it but inside the table above: a bounded number, however the tree nests. Under the same condition
    so do the rows of one range of prompt lengths that no deeper subtree's table holds.
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
    return _split_by_prompt(tree.lengths, table_of, parent[:made], size[:made], least)


def _split_by_prompt(
    prompts: NDArray[np.int32], table_of: NDArray[np.int32], parent: NDArray[np.int32], size: NDArray[Any], least: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`table_of` and `parent` with the tables of prompt-length ranges added: 1 to 3 tokens, 4 to 15, 16 to 63, ...

    Finer ranges would cut one kind of rows into several tables of few answers each.
    """
    ranges = 16
    own = table_of * ranges + (np.frexp(np.maximum(prompts, 1))[1] - 1) // 2
    count = np.bincount(own, minlength=parent.size * ranges)
    above = np.repeat(np.arange(parent.size, dtype=np.int32), ranges)
    fits = (count >= least) & (size[above] - count >= least // 8)
    fits &= np.cumsum(fits) <= _MOST_TABLES - parent.size
    table = np.where(fits, parent.size - 1 + np.cumsum(fits), above).astype(np.int32)
    return table[own], np.concatenate((parent, above[fits]))


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
    counts: Any, kind: Any, noted: Any,
) -> None:  # fmt: skip
    for i in range(requests.size):
        r = requests[i]
        if known[r] > 0:
            continue
        if kind[r] >= 0:
            _count(counts[:, table_of[r]], edges, kind[r], noted[r], -1)
        noted[r] = min(generated[i], cap[r])
        kind[r] = -1
        if noted[r] > 0:
            kind[r] = _RUNNING if not finished[i] else _ENDED if noted[r] < cap[r] else _EXHAUSTED
            _count(counts[:, table_of[r]], edges, kind[r], noted[r], 1)


@njit(cache=True)
def _count(counts: Any, edges: Any, kind: int, tokens: int, rows: int) -> None:
    """Count a row in its bin, or take it back; a censored one is in the bin of the first token not known of."""
    b = _bin(edges, tokens if kind == _ENDED else tokens + 1)
    counts[kind, b] += rows
    if kind != _ENDED:
        counts[_TOKENS, b] += rows * (tokens - edges[b])


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


def _pool(parent: NDArray[np.int32], rows: NDArray[Any], counts: NDArray[np.int64]) -> tuple[Floats, NDArray[Any]]:
    """Per table, the counts of what was seen in it and below it, and the number of answers among them.

    Each part of a table is weighted by its rows, and the whole scaled to the number of observations.
    """
    seen = counts[:_TOKENS].sum((0, 2))
    answered = seen - counts[_RUNNING].sum(1)
    stood_for = np.where(seen > 0, rows, 0.0)  # rows of the parts of which something was seen
    pooled = counts * (rows / np.maximum(seen, 1))[:, None]
    _add_up(parent, rows.astype(np.float64), pooled, seen, answered, stood_for)
    pooled *= (seen / np.maximum(stood_for, 1.0))[:, None]
    return pooled, answered


@njit(cache=True)
def _add_up(parent: Any, within: Any, pooled: Any, seen: Any, answered: Any, stood_for: Any) -> None:
    """Add each table to those above it, as many times as the rows `within` it are those that it stands for."""
    kinds, tables, edges = pooled.shape
    for t in range(tables - 1, 0, -1):
        above = parent[t]
        within[above] += within[t]
        if seen[t] == 0:
            continue
        for kind in range(kinds):
            for b in range(edges):
                pooled[kind, above, b] += within[t] / stood_for[t] * pooled[kind, t, b]
        seen[above] += seen[t]
        answered[above] += answered[t]
        stood_for[above] += within[t]


@njit(cache=True)
def _survive(parent: Any, edges: Any, pooled: Any, answered: Any, curve: Any) -> None:
    """Fill each table's curve, parents first."""
    bins = edges.size - 1
    prior = _PRIOR_MEDIAN / (_PRIOR_MEDIAN + edges)
    risk, lean = np.empty(bins), np.empty(bins)  # rows in the bin: seen there, and those that follow `above`
    for t in range(parent.size):
        ended, censored = pooled[_ENDED, t], pooled[_RUNNING, t] + pooled[_EXHAUSTED, t]
        beyond = censored[bins]
        for b in range(bins - 1, -1, -1):
            risk[b] = ended[b] + beyond + pooled[_TOKENS, t, b] / (edges[b + 1] - edges[b])
            lean[b] = 0.25 if beyond == 0.0 else 0.0
            beyond += ended[b] + censored[b]
        above = _extrapolated(edges, prior, ended, censored, risk)
        if answered[t] < _ENOUGH:
            if t > 0:
                above = _mixed(curve[parent[t], :, 0], above, prior, ended, censored)
            lean[:] = _LEAN * (1.0 - answered[t] / _ENOUGH) * above[:bins]
        s, sum1, sum2 = 1.0, 0.0, 0.0
        for b in range(bins):
            low, width = edges[b], float(edges[b + 1] - edges[b])
            hazard = (ended[b] + lean[b] * (1.0 - above[b + 1] / above[b])) / (risk[b] + lean[b])
            curve[t, b] = s, sum1, sum2
            slope = s * hazard / width
            pairs = width * (width - 1) / 2
            squares = pairs * (2 * width - 1) / 3
            sum1 += width * s - slope * pairs
            sum2 += s * ((2 * low + 1) * width + 2 * pairs) - slope * ((2 * low + 1) * pairs + 2 * squares)
            s *= 1.0 - hazard
        curve[t, bins] = s, sum1, sum2


@njit(cache=True)
def _extrapolated(edges: Any, prior: Any, ended: Any, censored: Any, risk: Any) -> Any:
    """The prior's survival up to the last bin in which a row was seen, and from there the tail that is likely."""
    survival = prior.copy()
    last = risk.size - 1
    while last >= 0 and ended[last] + censored[last] == 0.0:
        last -= 1
    if last < 0:
        return survival
    x = edges[last] + 1.0
    wanted = max(5.0, math.sqrt(ended.sum()), censored[last:].sum())
    events, exposure = 0.0, 0.0
    for b in range(last, -1, -1):
        events += ended[b]
        exposure += (risk[b] - ended[b] / 2) * math.log((edges[b + 1] + 1) / (edges[b] + 1))
        if events >= wanted:
            break
    exponent = min(max((2.0 + events) / (1.0 + exposure), _LEAST_EXPONENT), _MOST_EXPONENT)
    for b in range(last, risk.size):
        local = min(exponent * ((edges[b] + 1) / x) ** _STEEPER, _MOST_EXPONENT)
        survival[b + 1] = survival[b] * ((edges[b] + 1) / (edges[b + 1] + 1)) ** local
    return survival


@njit(cache=True)
def _mixed(parent: Any, own: Any, prior: Any, ended: Any, censored: Any) -> Any:
    """The survival that a table with few answers leans on: its parent's, or its own if what was seen says so."""
    log_odds = math.log(_NEW_KIND)
    for b in range(parent.size):
        if ended[b] > 0:
            log_odds += ended[b] * math.log((prior[b] - prior[b + 1]) / (parent[b] - parent[b + 1]))
        if censored[b] > 0:
            log_odds += censored[b] * math.log(prior[b] / parent[b])
    share = 1.0 / (1.0 + math.exp(-log_odds))
    return share * own + (1.0 - share) * parent


@njit(cache=True)
def _upto(edges: Any, curve: Any, table: int, x: int) -> Any:
    """S(x), and the sums of S(o) and (2 o + 1) S(o) over o < x; S falls linearly within a bin."""
    b = min(_bin(edges, x + 1), edges.size - 2)
    low, j = edges[b], float(x - edges[b])
    s, sum1, sum2 = curve[table, b]
    slope = (s - curve[table, b + 1, 0]) / (edges[b + 1] - low)
    pairs = j * (j - 1) / 2
    squares = pairs * (2 * j - 1) / 3
    sum1 += j * s - slope * pairs
    sum2 += s * ((2 * low + 1) * j + 2 * pairs) - slope * ((2 * low + 1) * pairs + 2 * squares)
    return s - slope * j, sum1, sum2


@njit(cache=True)
def _expected(requests: Any, known: Any, cap: Any, table_of: Any, edges: Any, curve: Any) -> Any:
    mean, second = np.empty(requests.size), np.empty(requests.size)
    for i in range(requests.size):
        r = requests[i]
        mean[i], second[i] = known[r], float(known[r]) ** 2
        if known[r] == 0:
            _, mean[i], second[i] = _upto(edges, curve, table_of[r], cap[r])
    return mean, second


@njit(cache=True)
def _remaining(requests: Any, generated: Any, known: Any, cap: Any, table_of: Any, edges: Any, curve: Any) -> Any:
    left = np.zeros(requests.size)
    for i in range(requests.size):
        r, done = requests[i], generated[i]
        if done >= cap[r]:
            continue
        tokens = float(known[r] - done)
        if known[r] == 0:
            survival, before, _ = _upto(edges, curve, table_of[r], done)
            tokens = (_upto(edges, curve, table_of[r], cap[r])[1] - before) / survival
        left[i] = max(tokens, 1.0)
    return left
