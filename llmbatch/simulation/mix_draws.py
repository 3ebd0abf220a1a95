"""Mixes of three traces with a wanted compute density and prefix sharing, exact on the rows drawn.

The three are a compute-heavy, a prefix-sharing and a memory-heavy source (BlendServe, appendix A.3). Density is compute
seconds, without those of shared prompt tokens, over memory seconds; sharing is shared prompt tokens over prompt tokens.
The counts cannot be solved from the sources' means: how much rows share depends on how many are drawn, and a source of
long answers is so heavy-tailed that a few hundred draws of it miss its mean by far. So the rows come first and the
counts after: each source is a stream of draws, the mix is the first so many of each, and the best counts are found from
exact totals.

Totals of the first k draws, for all k, are prefix sums once it is known which tokens of a draw an earlier one has
computed. A row that joins a prefix tree adds its length less the longest prefix it has in common with a row already
there, and among sorted rows that is one of its neighbours. So all rows are taken away again, the last drawn first: the
neighbours a row then has were drawn before it. A linked list does that in one pass; when a row leaves, its neighbours
share the lesser of what it shared with either (`known_before`). Drawing a row again adds only its text after the last
block that another row of the trace shares: that text is new for each draw.

Density and sharing of any three counts are then a few look-ups. For each count of the prefix-sharing source the
memory-heavy count that meets the density is found by bisection, for all at once, and the best pair is taken. The same
pass finds the sharings that a density allows, for the error message. If the best misses the tolerance (few requests,
one of which may hold most memory seconds), other streams are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError
from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.simulation.mixes import Mix
from llmbatch.simulation.traces import SYSTEM_PROMPT, Trace, join

Floats = NDArray[np.float64]

_DENSITY_TOLERANCE = 0.01  # relative
_SHARING_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Drawn:
    """The requests of a mix in the order of a job, with their density and sharing."""

    trace: Trace
    counts: tuple[int, int, int]  # draws of the compute-heavy, the prefix-sharing and the memory-heavy source
    density: float
    sharing: float


def draw_mix(traces: Sequence[Trace], mix: Mix, requests: int, cost: CostModel, seed: int) -> Drawn:
    """Draw so many requests from the compute-heavy, the prefix-sharing and the memory-heavy trace, shuffled.

    Each source gets a system prompt of its own. A source is drawn through in random order, again and again in a new
    one. Density is met within 1 %, sharing within .005, on the rows drawn. The same arguments give the same rows.
    Raises `ParameterError` if no counts of draws reach that, with the reachable values.
    """
    if requests < 1:
        raise ParameterError(f"requests of a mix must be at least 1, got {requests}")
    if seed < 0:
        raise ParameterError(f"seed of a mix must be at least 0, got {seed}")
    sources = Sources.of(_three(traces, mix), cost)
    rng = np.random.default_rng(seed)
    tries = []
    # One stream of many requests is much like another; of few, hardly one in fifty may do.
    for _ in range(min(max(1_000_000 // requests, 5), 300)):
        streams = sources.streams(requests, rng)
        found = streams.nearest(mix)
        if found.miss <= 1:
            rows = rng.permutation(streams.first(*found.counts))
            density, sharing = streams.density(*found.counts), streams.sharing(*found.counts)
            return Drawn(sources.trace.take(rows), found.counts, float(density), float(sharing))
        tries.append(found)
    raise _unreachable(mix, streams, tries)


def _three(traces: Sequence[Trace], mix: Mix) -> tuple[Trace, Trace, Trace]:
    """Find the sources of a mix. Raises `ParameterError` unless there are three, none of them twice."""
    if mix.groups is not None and len(traces) in (2, 3):
        three = traces[0], mix.groups.trace(), traces[-1]
    elif mix.groups is None and len(traces) == 3:
        three = traces[0], traces[1], traces[2]
    else:
        needed = "three traces" if mix.groups is None else "two traces, or three, the second being replaced"
        raise ParameterError(
            f"this mix must have {needed}, got {len(traces)}: name the compute-heavy, the prefix-sharing and "
            "the memory-heavy one, in this order"
        )
    name, most = Counter(name for trace in three for name in trace.names).most_common(1)[0]
    if most > 1:
        raise ParameterError(
            f"the traces of a mix must be of different sources, but {name!r} is in two of them: give it "
            "another name in the column source"
        )
    return three


@dataclass(frozen=True, slots=True)
class Sources:
    """The `n` rows that a mix draws from: those of its three sources, one after another, with system prompts."""

    trace: Trace  # lists the ids that more than one draw can have in common
    starts: tuple[int, int, int, int]  # the rows of source s are [starts[s], starts[s + 1])
    tree: PrefixTree
    again: NDArray[np.int32]  # [n] prompt tokens that a second draw shares with the first
    compute: Floats  # [n] seconds, nothing shared
    memory: Floats  # [n] seconds
    cost: CostModel

    @classmethod
    def of(cls, sources: tuple[Trace, Trace, Trace], cost: CostModel) -> Sources:
        """Lay out three traces that have no source in common."""
        a, b, c = (len(source) for source in sources)
        whole = join(sources)
        whole = whole.with_system_prompts(np.ones(len(whole), np.bool_))
        tree = whole.tree()
        shared = np.empty(len(whole), np.int32)
        shared[tree.rows] = np.maximum(tree.lcp, np.append(tree.lcp[1:], 0))
        keep = -(-np.maximum(shared, SYSTEM_PROMPT) // whole.block_size)
        p, d = whole.prompt_lengths, whole.output_lengths.astype(np.float64)
        return cls(
            whole.cut(keep),
            (0, a, a + b, a + b + c),
            tree,
            np.minimum(keep * whole.block_size, p),
            cost.request_compute(p, d),
            cost.request_memory(p, d, d * d),
            cost,
        )

    def streams(self, length: int, rng: np.random.Generator) -> Streams:
        """Draw so many rows from each source."""
        each = [np.arange(first, last, dtype=np.int32) for first, last in pairwise(self.starts)]
        # [times a source is drawn through, its rows]
        orders = [rng.permuted(np.broadcast_to(rows, (-(-length // rows.size), rows.size)), axis=1) for rows in each]
        known = known_before(self.tree.rows, self.tree.lcp, np.concatenate([order[0] for order in orders]))
        rows = np.stack([order.ravel()[:length] for order in orders])
        shared = self.again[rows]
        for row, draws, source in zip(rows, shared, each):  # what is drawn first finds less there
            draws[: source.size] = known[row[: source.size]]
        return Streams(
            rows,
            _totals(self.compute[rows] - self.cost.prompt_seconds(shared)),
            _totals(self.memory[rows]),
            _totals(self.trace.prompt_lengths[rows]),
            _totals(shared),
        )


@dataclass(frozen=True, slots=True)
class Nearest:
    """The counts that come nearest to a mix."""

    counts: tuple[int, int, int]
    miss: float  # the larger of the misses of density and sharing, in tolerances
    sharings: Floats  # [any] the sharings of all counts that meet the density


@dataclass(frozen=True, slots=True)
class Streams:
    """`length` draws from each of three sources, and the totals of the first k draws of each for all k.

    A count is a number of draws of a source, in [0, length]; not all three may be 0.
    """

    rows: NDArray[np.int32]  # [3, length] rows of `Sources`
    compute: Floats  # [3, length + 1] seconds, without those of shared prompt tokens
    memory: Floats  # [3, length + 1] seconds
    prompt: Floats  # [3, length + 1] tokens
    shared: Floats  # [3, length + 1] prompt tokens that an earlier draw has computed

    def density(self, a: Any, b: Any, c: Any) -> Any:
        """Return compute over memory seconds of the first draws, so many of each source; elementwise."""
        return _sum(self.compute, a, b, c) / _sum(self.memory, a, b, c)

    def sharing(self, a: Any, b: Any, c: Any) -> Any:
        """Return shared prompt tokens over prompt tokens of the first draws; elementwise."""
        return _sum(self.shared, a, b, c) / _sum(self.prompt, a, b, c)

    def first(self, a: int, b: int, c: int) -> NDArray[np.int32]:
        """Return the rows of the first draws, source after source."""
        return np.concatenate([rows[:count] for rows, count in zip(self.rows, (a, b, c))])

    def nearest(self, mix: Mix) -> Nearest:
        """Find the counts, `length` together, that come nearest to the mix."""
        length = self.rows.shape[1]
        b = np.arange(length + 1)
        # The least c at which the density is not above the wanted one lies in [low, high].
        low, high = np.zeros_like(b), length - b
        for _ in range(length.bit_length()):
            c = (low + high) // 2
            above = self.density(length - b - c, b, c) > mix.density
            low, high = np.where(above, np.minimum(c + 1, high), low), np.where(above, high, c)
        b, c = np.tile(b, 2), np.concatenate([low, np.maximum(low - 1, 0)])
        density, sharing = self.density(length - b - c, b, c), self.sharing(length - b - c, b, c)
        off = np.abs(density / mix.density - 1) / _DENSITY_TOLERANCE
        miss = np.maximum(off, np.abs(sharing - mix.sharing) / _SHARING_TOLERANCE)
        best = int(np.argmin(miss))
        counts = length - int(b[best] + c[best]), int(b[best]), int(c[best])
        return Nearest(counts, float(miss[best]), sharing[off <= 1])


def _unreachable(mix: Mix, streams: Streams, tries: Sequence[Nearest]) -> ParameterError:
    """Explain why no draw met the mix, and what would be met."""
    length = streams.rows.shape[1]
    alone = [streams.density(*counts) for counts in ((length, 0, 0), (0, length, 0), (0, 0, length))]
    sharings = np.concatenate([nearest.sharings for nearest in tries])
    what = f"{length} requests of these traces"
    if alone[0] <= alone[2]:
        return ParameterError(
            "the first trace of a mix must have a higher compute density than the third, got "
            f"{alone[0]:.3g} and {alone[2]:.3g}: name the compute-heavy trace first and the memory-heavy one last"
        )
    if not min(alone) <= mix.density <= max(alone):
        return ParameterError(
            f"the density of {what} must be {min(alone):.3g} to {max(alone):.3g}, got {mix.density:g}: "
            "choose one in between, or other traces"
        )
    if sharings.size and not sharings.min() <= mix.sharing <= sharings.max():
        return ParameterError(
            f"at a density of {mix.density:g} the sharing of {what} must be {sharings.min():.3f} to "
            f"{sharings.max():.3f}, got {mix.sharing:g}: choose one in between, other traces or more "
            "requests"
        )
    return ParameterError(
        f"no counts of {what} came within 1 % of a density of {mix.density:g} and .005 of a sharing of "
        f"{mix.sharing:g} in {len(tries)} draws: ask for more requests"
    )


def _totals(values: NDArray[Any]) -> Floats:
    """Sum the first k columns, for all k: float64 [3, n + 1], exact for token counts."""
    totals = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, dtype=np.float64, out=totals[:, 1:])
    return totals


def _sum(totals: Floats, a: Any, b: Any, c: Any) -> Any:
    return totals[0][a] + totals[1][b] + totals[2][c]


@compiled
def known_before(rows: Any, lcp: Any, order: Any) -> Any:
    """Count the tokens that each row shares with some row before it in `order`: int32, by row.

    `rows` and `lcp` are those of a prefix tree, `order` has each of its rows once.
    """
    n = rows.size
    place = np.empty(n, np.int64)
    for i in range(n):
        place[rows[i]] = i + 1
    # Places 1 .. n hold the sorted rows, 0 and n + 1 nothing. common[i]: what i shares with left[i].
    left = np.arange(-1, n + 1)
    right = np.arange(1, n + 3)
    common = np.zeros(n + 2, np.int32)
    common[1 : n + 1] = lcp
    known = np.empty(n, np.int32)
    for t in range(n - 1, -1, -1):
        i = place[order[t]]
        j = right[i]
        known[order[t]] = max(common[i], common[j])
        common[j] = min(common[i], common[j])
        right[left[i]], left[j] = j, left[i]
    return known
