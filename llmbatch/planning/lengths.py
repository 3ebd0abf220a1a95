"""Output-length distributions over the prefix tree: which requests share one, and what it predicts.

Idea. BlendServe 5.1 gives each subtree the mean length of a sample. Decode memory grows with the square of the length,
so a mean is wrong by a factor: a distribution is needed. This module keeps a *table* for the shard, one for each key
(other properties of rows, such as sampling parameters), one for each subtree that is large enough, and one for each
range of prompt lengths where prefixes do not separate rows further. Tables form a tree of their own; a row belongs to
the deepest one around it. A table counts, per bin of lengths, the answers that ended there and those last seen running
there. Finished answers are events; running answers and answers cut by `max_tokens` are censored (Kaplan and Meier,
1958), so a half-run sample is not biased to the short. Observations count in the tables above as well. Each counts for
as many rows as its own table has per observation, so a table that was sampled more than its neighbours does not
outweigh them. `llmbatch.planning.survival` turns counts into distributions.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.errors import ParameterError
from llmbatch.planning.prefix_tree import PrefixTree
from llmbatch.planning.survival import bin_edges, expected_tokens, observe, pool, remaining_tokens, survive

Floats = NDArray[np.float64]

_MOST_TABLES = 4096
_MOST_KEYS = 64


class Expected(NamedTuple):
    """Moments of the output lengths of requests, or of their remaining lengths, each capped by its `max_tokens`."""

    mean: Floats
    second_moment: Floats  # E[length^2]


class LengthModel:
    """The knowledge of output lengths of a shard's requests; requests are numbered as the tree's rows.

    `max_tokens` int32 by row, `keys` int32 by row (equal keys may share a distribution), `known` int32 by row: the
    exact length if known beforehand, 0 elsewhere. Rows with `max_tokens` 1 are always known. Of a row whose answer
    begins with `begun` tokens, int32 by row, all lengths are those of what is to come; what is learnt of it is whole.
    """

    def __init__(
        self,
        tree: PrefixTree,
        max_tokens: NDArray[np.int32],
        *,
        keys: NDArray[np.int32] | None = None,
        known: NDArray[np.int32] | None = None,
        begun: NDArray[np.int32] | None = None,
    ) -> None:
        if len(tree) and int(max_tokens.min()) < 1:
            raise ParameterError(f"max_tokens must be at least 1, got {int(max_tokens.min())}")
        self.max_tokens = max_tokens
        self._begun = np.zeros(max_tokens.size, np.int32) if begun is None else begun
        self._cap = max_tokens + self._begun  # of the whole answer, as all that follows
        known = np.zeros(max_tokens.size, np.int32) if known is None else np.minimum(known, max_tokens)
        known = np.where(max_tokens == 1, np.int32(1), known)
        self.known: NDArray[np.int32] = np.where(known > 0, known + self._begun, np.int32(0))
        self.edges: NDArray[np.int64] = bin_edges(self._cap)  # of the bins: e[b] < D <= e[b + 1]
        self.table_of: NDArray[np.int32]
        self.parent: NDArray[np.int32]
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
        """The number of distributions."""
        return self.parent.size

    @property
    def observed(self) -> NDArray[np.bool_]:
        """Whether each row has been observed, finished or still running: by row."""
        return self._kind >= 0

    @property
    def survival(self) -> Floats:
        """Return P(D > e) of each table's rows at each of `edges`, caps aside: [tables, edges]."""
        return self._curve[:, :, 0]

    def observe(self, requests: NDArray[np.int32], generated: NDArray[np.int32], finished: NDArray[np.bool_]) -> None:
        """Note how many tokens each request has generated and whether it has finished, replacing earlier notes.

        Takes effect at the next `refresh`. Requests of known length and requests with no generated token are ignored.
        """
        observe(  # of one layout, or it is compiled twice: the scheduler's are a field of records
            np.ascontiguousarray(requests),
            generated + self._begun[requests],
            finished,
            self.known,
            self._cap,
            self.table_of,
            self.edges,
            self._counts,
            self._kind,
            self._generated,
        )

    def expect(self, requests: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Expect answers of so many tokens of requests that arrive; nothing is learnt from them."""
        self.known[requests] = np.clip(tokens, 1, self.max_tokens[requests])

    def copy(self) -> LengthModel:
        """Copy what is known, for plans to be made of while this one learns."""
        copied = copy.copy(self)
        copied.known, copied._counts, copied._curve = self.known.copy(), self._counts.copy(), self._curve.copy()
        copied._kind, copied._generated = self._kind.copy(), self._generated.copy()
        return copied

    def refresh(self) -> None:
        """Recompute the tables from the observations: one pass up, one down, linear in tables x bins."""
        pooled, answered = pool(self.parent, self._rows, self._counts)
        survive(self.parent, self.edges, pooled, answered, self._curve)

    def expected(self, requests: NDArray[np.int32]) -> Expected:
        """Return mean and second moment of the output lengths of waiting requests, float64 each."""
        found = Expected(*expected_tokens(requests, self.known, self._cap, self.table_of, self.edges, self._curve))
        some = np.flatnonzero(self._begun[requests])
        if len(some):
            left = self.remaining(requests[some], np.zeros(len(some), np.int32))
            found.mean[some], found.second_moment[some] = left.mean, left.second_moment
        return found

    def draw(self, requests: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
        """Draw a length for each request from its distribution; int32, at least 1.

        Stratified: of n requests of one distribution each has a length from another n-th of it.
        """
        drawn = self.known[requests].astype(np.int32)
        tables = np.where(drawn > 0, -1, self.table_of[requests])
        by_table = np.argsort(tables, kind="stable")
        for at in np.split(by_table, np.flatnonzero(np.diff(tables[by_table])) + 1):
            if len(at) and tables[at[0]] >= 0:
                reached = (rng.permutation(len(at)) + rng.random(len(at))) / len(at)  # P(D > length)
                length = np.ceil(np.interp(-reached, -self.survival[tables[at[0]]], self.edges))
                drawn[at] = np.minimum(length, self._cap[requests[at]])
        further: NDArray[np.int32] = np.maximum(drawn - self._begun[requests], 1)
        return further

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> Expected:
        """Return moments of the further tokens of running requests: at least 1 below `max_tokens`, 0 from there on."""
        return Expected(
            *remaining_tokens(
                np.ascontiguousarray(requests),
                generated + self._begun[requests],
                self.known,
                self._cap,
                self.table_of,
                self.edges,
                self._curve,
            )
        )


def _tables(tree: PrefixTree, keys: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Assign a table to each row, and a parent to each table (always before it; the root's is -1).

    A subtree gets a table if it holds 1 / 2,048 of the rows, at least 32, and an eighth of that lies outside it but
    inside the table above: a bounded number, however the tree nests. Under the same condition the rows of one range of
    prompt lengths that no deeper subtree's table holds get a table.
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
        )  # fmt: skip  # arguments in groups
    return _split_by_prompt(tree.lengths, table_of, parent[:made], size[:made], least)


def _split_by_prompt(
    prompts: NDArray[np.int32], table_of: NDArray[np.int32], parent: NDArray[np.int32], size: NDArray[Any], least: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Add tables of prompt-length ranges to `table_of` and `parent`: 1 to 3 tokens, 4 to 15, 16 to 63, ...

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


@compiled(nogil=True)
def _subtrees(
    rows: Any, leaf: Any, node_parent: Any, first: Any, last: Any, kind_of: Any, kind: int, above: int, least: int,
    made: int, reserved: int, table_of: Any, parent: Any, size: Any,
) -> int:  # fmt: skip  # arguments in groups
    """Make the tables of one kind below table `above`, and assign each of its rows to one of them."""
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
