"""Kinds of steps, and steps of a kind over pages in random order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step

PAGE_SIZE = 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CONTEXTS = (100, 1000, 4000)


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
    def sampled_keys(self) -> int:
        """The keys that the rows see which are sampled from."""
        ends = zip(self.starts, self.counts, self.samples, strict=True)
        return sum(start + count for start, count, sampled in ends if sampled)

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
