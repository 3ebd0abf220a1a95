"""Survival tables: counts of answers by length, censored ones included, as distributions.

Survival. In bin b the hazard is h = (ended + k (A(b) - A(b + 1))) / (at risk + k A(b)). The risk set of bin b is every
row that ended in or beyond b, plus, for each row still running in b, the fraction of b it has completed. Without that
fraction a bin full of running rows would look as if only its few ended rows existed. If fewer than 20 answers are
complete, k = 4 (1 - complete / 20) rows are taken to follow a distribution A (a Dirichlet prior: Susarla and Van Ryzin,
1976): few answers lean on the parent, twenty stand alone, and an MMLU group is not given its neighbours' essays. A few
rows that still run when all neighbours have long ended are of a new kind, and the neighbours' tail does not predict
them. So A is a mixture of the parent's distribution and the table's own extrapolation, weighted by how likely each
makes the table's observations, with prior odds of a thousand to one for the parent. With 20 or more answers, A is the
table's own extrapolation. It is used only in bins that no observation got beyond, with the weight of a quarter row. The
prior is P(D > o) = 256 / (256 + o): half of the answers within 256 tokens and a tail that `max_tokens` cuts. Without
observations every row gets the prior.

Beyond the observations. Up to x, where the last of its rows was seen, a table's own extrapolation is the prior; from
there on -d log S / d log o = a (o / x)^(2/3), at most 4. The exponents of real answers rise along their tails, as a
Weibull distribution's do: in proportion to o if it is exponential, more slowly if it is heavier. a is the censored
maximum-likelihood estimate of that tail, started from 2 and kept within 2/3 and 4, by local likelihood (Loader, 1996):
an observation at length o has the weight (o / x)^f. If answers were spread evenly up to x, a fraction 1 / (f + 1) of
them would count. f is chosen so that this makes 5, or the root of their number, or three for every two rows that are
still running, weighted by the same o / x: the more of the tail is hidden, the wider the window must be. Hill (1975)
counts exactly the k longest answers; as rows end or pass into another bin, such an estimate of E[d^2] from a few dozen
answers jumps by a factor of four.

The estimate is uncertain, so the survival is averaged over the values a may have. With n answers a has a Gamma
distribution of shape n + 2. With H the hazard that the estimate gives the tail up to o, S therefore falls as (1 + H /
(n + 2))^-(n + 2) and not as e^-H. If no row of a kind has ended yet, most of its memory work lies where the likeliest
tail would rule it out; after a hundred answers the two agree.

Moments. From survival S follow E[min(D, cap)] = sum S(o) and E[min(D, cap)^2] = sum (2 o + 1) S(o) over o < cap, and
the remainder of a running row, E[min(D, cap) - o | D > o], with its square's mean. Partial sums at the bins' edges make
each of them one lookup.

Bins. One width cannot serve answers of 2 and of 70,000 tokens. Bins are one token wide up to 16, then a sixteenth of
their octave: 64 tokens at 1,024. Errors within a bin stay near 6 % of the length and a table near 200 bins. If at most
16 caps occur, they are edges too: rows that exhaust `max_tokens` are then exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled

Floats = NDArray[np.float64]

_ENOUGH = 20  # answers that need no parent
_LEAN = 4.0  # rows' worth of the parent where no answer is complete
_NEW_KIND = 1e-3  # odds that a table's rows are of a kind not seen above
_PRIOR_MEDIAN = 256.0
_LEAST_EXPONENT, _MOST_EXPONENT = 2 / 3, 4.0  # of a tail
_STEEPER = 2 / 3  # power of the length with which a tail's exponent rises
_AS_RUN = 1.5  # answers that a tail is estimated from, for each row still running
_MOST_HAZARD = 1.0 - 1e-9  # of a bin: a row that outruns every expectation still has something left
_ENDED, _RUNNING, _EXHAUSTED, _TOKENS = range(4)


def bin_edges(max_tokens: NDArray[np.int32]) -> NDArray[np.int64]:
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


@compiled
def observe(
    requests: Any,
    generated: Any,
    finished: Any,
    known: Any,
    cap: Any,
    table_of: Any,
    edges: Any,
    counts: Any,
    kind: Any,
    noted: Any,
) -> None:
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


@compiled
def _count(counts: Any, edges: Any, kind: int, tokens: int, rows: int) -> None:
    """Count a row in its bin, or uncount it; a censored row is in the bin of its first unknown token."""
    b = _bin(edges, tokens if kind == _ENDED else tokens + 1)
    counts[kind, b] += rows
    if kind != _ENDED:
        counts[_TOKENS, b] += rows * (tokens - edges[b])


@compiled
def _bin(edges: Any, tokens: int) -> int:
    """Find the bin b with edges[b] < tokens <= edges[b + 1]; the number of bins if it lies beyond the last."""
    low, high = 0, edges.size
    while low < high:
        middle = (low + high) // 2
        if edges[middle] < tokens:
            low = middle + 1
        else:
            high = middle
    return low - 1


def pool(parent: NDArray[np.int32], rows: NDArray[Any], counts: NDArray[np.int64]) -> tuple[Floats, NDArray[Any]]:
    """Count, per table, the observations in it and below it, and the number of answers among them.

    Each part of a table is weighted by its rows, and the whole scaled to the number of observations.
    """
    seen = counts[:_TOKENS].sum((0, 2))
    answered = seen - counts[_RUNNING].sum(1)
    stood_for = np.where(seen > 0, rows, 0.0)  # rows of the parts with observations
    pooled = counts * (rows / np.maximum(seen, 1))[:, None]
    _add_up(parent, rows.astype(np.float64), pooled, seen, answered, stood_for)
    pooled *= (seen / np.maximum(stood_for, 1.0))[:, None]
    return pooled, answered


@compiled
def _add_up(parent: Any, within: Any, pooled: Any, seen: Any, answered: Any, stood_for: Any) -> None:
    """Add each table to those above it, as many times as the rows `within` it that it represents."""
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


@compiled
def survive(parent: Any, edges: Any, pooled: Any, answered: Any, curve: Any) -> None:
    """Fill each table's curve, parents first.

    Element by element: an assignment to a slice may fail, and what numba says then takes 4 s to compile.
    """
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
            leaning = _LEAN * (1.0 - answered[t] / _ENOUGH)
            for b in range(bins):
                lean[b] = leaning * above[b]
        s, sum1, sum2 = 1.0, 0.0, 0.0
        for b in range(bins):
            low, width = edges[b], float(edges[b + 1] - edges[b])
            hazard = (ended[b] + lean[b] * (1.0 - above[b + 1] / above[b])) / (risk[b] + lean[b])
            hazard = min(hazard, _MOST_HAZARD)
            curve[t, b, 0], curve[t, b, 1], curve[t, b, 2] = s, sum1, sum2
            slope = s * hazard / width
            pairs = width * (width - 1) / 2
            squares = pairs * (2 * width - 1) / 3
            sum1 += width * s - slope * pairs
            sum2 += s * ((2 * low + 1) * width + 2 * pairs) - slope * ((2 * low + 1) * pairs + 2 * squares)
            s *= 1.0 - hazard
        curve[t, bins, 0], curve[t, bins, 1], curve[t, bins, 2] = s, sum1, sum2


@compiled
def _extrapolated(edges: Any, prior: Any, ended: Any, censored: Any, risk: Any) -> Any:
    """Extrapolate: the prior's survival up to the last bin in which a row was seen, then the likely tail."""
    survival = prior.copy()
    last = risk.size - 1
    while last >= 0 and ended[last] + censored[last] == 0.0:
        last -= 1
    if last < 0:
        return survival
    x = edges[last] + 1.0
    running, answers = 0.0, ended.sum()
    for b in range(censored.size):
        running += min((edges[b] + 1) / x, 1.0) * censored[b]
    fading = max(answers / max(5.0, math.sqrt(answers), _AS_RUN * running) - 1.0, 0.0)
    events, exposure = 0.0, 0.0
    for b in range(last + 1):
        low, high = (edges[b] + 1) / x, (edges[b + 1] + 1) / x
        weight = min((low + high) / 2, 1.0) ** fading
        events += weight * ended[b]
        exposure += weight * (risk[b] - ended[b] / 2) * (high**_STEEPER - low**_STEEPER) / _STEEPER
    shape = 2.0 + answers
    exponent = min(max((2.0 + events) / (1.0 + exposure), _LEAST_EXPONENT), _MOST_EXPONENT)
    hazard, begun = 0.0, survival[last]
    for b in range(last, risk.size):
        local = min(exponent * ((edges[b] + 1) / x) ** _STEEPER, _MOST_EXPONENT)
        hazard += local * math.log((edges[b + 1] + 1) / (edges[b] + 1))
        survival[b + 1] = begun * (1.0 + hazard / shape) ** -shape
    return survival


@compiled
def _mixed(parent: Any, own: Any, prior: Any, ended: Any, censored: Any) -> Any:
    """Mix the survival that a table with few answers leans on: its parent's, or its own if observations favour it."""
    log_odds = math.log(_NEW_KIND)
    for b in range(parent.size):
        if ended[b] > 0:
            log_odds += ended[b] * math.log((prior[b] - prior[b + 1]) / (parent[b] - parent[b + 1]))
        if censored[b] > 0:
            log_odds += censored[b] * math.log(prior[b] / parent[b])
    share = 1.0 / (1.0 + math.exp(-log_odds))
    return share * own + (1.0 - share) * parent


@compiled
def _partial_sums(edges: Any, curve: Any, table: int, x: int) -> Any:
    """Return S(x), and the sums of S(o) and (2 o + 1) S(o) over o < x; S falls linearly within a bin."""
    b = min(_bin(edges, x + 1), edges.size - 2)
    low, j = edges[b], float(x - edges[b])
    s, sum1, sum2 = curve[table, b]
    slope = (s - curve[table, b + 1, 0]) / (edges[b + 1] - low)
    pairs = j * (j - 1) / 2
    squares = pairs * (2 * j - 1) / 3
    sum1 += j * s - slope * pairs
    sum2 += s * ((2 * low + 1) * j + 2 * pairs) - slope * ((2 * low + 1) * pairs + 2 * squares)
    return s - slope * j, sum1, sum2


@compiled(nogil=True)
def expected_tokens(requests: Any, known: Any, cap: Any, table_of: Any, edges: Any, curve: Any) -> Any:
    mean, second = np.empty(requests.size), np.empty(requests.size)
    for i in range(requests.size):
        r = requests[i]
        mean[i], second[i] = known[r], float(known[r]) ** 2
        if known[r] == 0:
            _, mean[i], second[i] = _partial_sums(edges, curve, table_of[r], cap[r])
    return mean, second


@compiled
def remaining_tokens(requests: Any, generated: Any, known: Any, cap: Any, table_of: Any, edges: Any, curve: Any) -> Any:
    mean, second = np.zeros(requests.size), np.zeros(requests.size)
    for i in range(requests.size):
        r, done = requests[i], generated[i]
        if done >= cap[r]:
            continue
        mean[i] = max(float(known[r] - done), 1.0)
        second[i] = mean[i] ** 2
        if known[r] == 0:
            survival, before, before2 = _partial_sums(edges, curve, table_of[r], done)
            _, after, after2 = _partial_sums(edges, curve, table_of[r], cap[r])
            # E[(D - o)^2] is the sum of (2 (x - o) + 1) S(x) / S(o) over x >= o. Where hardly a row gets that far,
            # digits cancel, and the bounds of both moments hold them.
            most = float(cap[r] - done)
            mean[i] = min(max((after - before) / survival, 1.0), most)
            square = (after2 - before2 - 2.0 * done * (after - before)) / survival
            second[i] = min(max(square, mean[i] ** 2), mean[i] * most)
    return mean, second
