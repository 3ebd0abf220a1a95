"""What a scheduler decides, what an engine answers, and what has ended: `Step`, `StepResult`, `FinishedSequences`.

Compiled code writes a step down as `StepColumns` and `StepFigures`, of which `Step` is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.calls import call
from llmbatch.compilation.decorators import as_python, compiled
from llmbatch.kvcache.page_pool import PagePool, tokens_spared
from llmbatch.kvcache.publish import EndedPages
from llmbatch.perf_model.work import Reach, pairs_of, reads_of, spared_of
from llmbatch.scheduler.sequences import SequenceTable
from llmbatch.scheduler.state import SchedulerState


class FinishReason(IntEnum):
    """How a sequence stands after it was sampled."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3  # its logits were not finite; the sequence has no answer
    TIMEOUT = 4  # it ran longer than a row may; the sequence has no answer
    CANCELLED = 5  # nobody waits for it any more; the sequence has no answer


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over the packed chunks of several sequences. Frozen once decided.

    All arrays have one entry a sequence. The first `num_decodes` sequences compute one token each.
    A sequence's tokens are its prompt followed by what it has generated; its chunk is the tokens
    `[start, start + count)`. Sequences in one step may share pages: each layer of an engine must write
    the KV of the whole step before any of its sequences attends.

    Forks (`llmbatch.scheduler.forks`) stand behind the sequence whose prompt they have.
    """

    index: int
    num_decodes: int
    slots: NDArray[np.int32]  # the engine's place of each sequence; kept while it is preempted
    requests: NDArray[np.int32]  # index into the `RequestBatch`
    starts: NDArray[np.int32]  # tokens whose KV is already in pages
    counts: NDArray[np.int32]  # tokens computed now; 0 of a fork, which samples from the logits of the one before it
    samples: NDArray[np.bool_]  # True where the chunk ends at the last known token: one token is sampled
    block_tables: NDArray[np.int32]  # [slots, width] page of each page-sized block; valid during the step
    cached_tokens: int = 0  # prompt tokens of rows admitted in this step found in pages
    recomputed_tokens: int = 0  # tokens of this step that were computed once before a preemption
    preempted: int = 0  # sequences that lost their pages in this step
    running: int = 0  # sequences that hold pages, computing or waiting for the budget
    kv_tokens: int = 0  # tokens that the pages in use hold during the step, shared pages once
    # [copies, 2] pages whose KV is copied to another page when the step's tokens are computed
    copies: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 2), np.int32))
    spared_tokens: int = 0  # KV tokens that decodes need not read, where the engine reads shared prefixes together
    # Likewise of window pages, where layers with windows have pages of their own (`llmbatch.kvcache.windows`); what
    # stands before a sequence's window is any page.
    window_tables: NDArray[np.int32] | None = None

    @classmethod
    def decided(cls, state: SchedulerState, index: int) -> Step:
        """Write down the step that was decided, which has this number."""
        pages = state.pages
        columns, figures = call(_freeze, state)
        return cls(
            index=index,
            **columns._asdict(),
            **figures._asdict(),
            block_tables=pages.tables,
            window_tables=pages.windows.tables_of_step,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return int(self.counts.sum())

    def prefill_pairs(self, reach: Reach) -> float:
        """Count the query-key pairs of its prefills, as `llmbatch.perf_model.work` counts them."""
        starts, counts = (column[self.num_decodes :].astype(np.float64) for column in (self.starts, self.counts))
        return float(np.sum(as_python(pairs_of)(reach, starts, counts)))

    def read_tokens(self, reach: Reach) -> float:
        """Count the KV tokens that it reads, those that decodes read together once."""
        some = self.counts > 0
        read = as_python(reads_of)(reach, self.starts[some].astype(np.float64), self.counts[some].astype(np.float64))
        return max(0.0, float(np.sum(read) - as_python(spared_of)(reach, self.spared_tokens)))


class StepColumns(NamedTuple):
    """A step as arrays with an entry a sequence, decodes first; see `Step`."""

    slots: NDArray[np.int32]
    requests: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    copies: NDArray[np.int32]


class StepFigures(NamedTuple):
    """What is counted of a step that was decided; see `Step`."""

    num_decodes: int
    cached_tokens: int
    recomputed_tokens: int
    preempted: int
    running: int
    kv_tokens: int
    spared_tokens: int


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens that follow those that a step sampled, because a grammar allows no other ones.

    They are part of the answer, and are computed by the next chunk of their sequence.
    """

    counts: NDArray[np.int32]  # one entry a sampled sequence, in the step's order
    tokens: NDArray[np.int32]  # of one sequence behind the other


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: one entry a sampled sequence, in the step's order."""

    tokens: NDArray[np.int32]
    finished: NDArray[np.uint8]  # a `FinishReason` each
    spare: NDArray[np.bool_] | None = None  # True where the sequence had ended in the step before; None: nowhere
    seconds: float | None = None  # that the step took by itself; None where the engine does not measure it
    forced: ForcedTokens | None = None  # None: none

    def all_tokens(self, requests: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8]]:
        """List the tokens of the step, forced ones behind those that were sampled, each with its request and reason."""
        if self.forced is None:
            return requests, self.tokens, self.finished
        counts = 1 + self.forced.counts
        tokens = np.empty(counts.sum(), np.int32)
        sampled = np.zeros(len(tokens), np.bool_)
        sampled[np.cumsum(counts) - counts] = True
        tokens[sampled], tokens[~sampled] = self.tokens, self.forced.tokens
        return np.repeat(requests, counts), tokens, np.repeat(self.finished, counts)


@dataclass(frozen=True, slots=True)
class FinishedSequences:
    """Sequences that ended in a step, one entry each."""

    requests: NDArray[np.int32]
    slots: NDArray[np.int32]
    reasons: NDArray[np.uint8]
    generated: NDArray[np.int32]  # tokens
    cached: NDArray[np.int32]  # prompt tokens found in pages, recomputation left out
    recomputed: NDArray[np.int32]  # tokens
    preemptions: NDArray[np.int32]
    admitted_step: NDArray[np.int32]
    end: NDArray[np.int32]  # an `End` each
    pages: EndedPages  # of their answers

    @classmethod
    def of(
        cls,
        run: SequenceTable,
        pages: PagePool,
        slots: NDArray[np.int32],
        reasons: NDArray[np.uint8],
        spare: NDArray[np.int32] | int = 0,
    ) -> FinishedSequences:
        """Read what sequences in these slots did, before the slots are free; `spare` of their tokens do not count."""
        records = run.slots[slots]
        return cls(
            requests=records["request"],
            slots=slots,
            reasons=reasons,
            generated=records["known"] - records["prompt"] - spare,
            cached=records["cached"],
            recomputed=records["recomputed"],
            preemptions=records["preemptions"],
            admitted_step=records["admitted_step"],
            end=records["end"],
            pages=EndedPages.of(pages, slots, records["computed"]),
        )


@compiled
def pack(state: SchedulerState) -> StepColumns:
    """Write the columns of the step that was decided: decodes first, and forks behind the chunks that they follow."""
    run, chunks = state.run, state.chunks
    decodes, forks, copied = run.counts[0].riding, chunks.totals[0].forks, 0
    total = decodes + chunks.totals[0].chunks + forks
    slots, requests = np.empty(total, np.int32), np.empty(total, np.int32)
    starts, counts = np.empty(total, np.int32), np.empty(total, np.int32)
    samples = np.empty(total, np.bool_)
    copies = np.empty((forks, 2), np.int32)
    for i in range(decodes):
        slots[i], counts[i], samples[i] = run.decoding[i], 1, True
    i, fork = decodes, 0
    for chunk in range(chunks.totals[0].chunks):
        slots[i], counts[i], samples[i] = chunks.slots[chunk], chunks.counts[chunk], chunks.samples[chunk]
        i += 1
        while fork < forks and chunks.leads[fork] == chunk:
            slots[i], counts[i], samples[i] = chunks.forks[fork], 0, True
            if chunks.copies[fork, 0] >= 0:
                copies[copied, 0], copies[copied, 1] = chunks.copies[fork, 0], chunks.copies[fork, 1]
                copied += 1
            i, fork = i + 1, fork + 1
    records = run.slots
    for i in range(total):
        record = records[slots[i]]
        requests[i] = record.request
        starts[i] = record.computed
    return StepColumns(slots, requests, starts, counts, samples, copies[:copied])


@compiled
def _freeze(state: SchedulerState) -> tuple[StepColumns, StepFigures]:
    counts, totals, pages = state.run.counts[0], state.chunks.totals[0], state.pages
    used = pages.num_pages - pages.counts[0].free - pages.counts[0].unused
    figures = StepFigures(
        counts.riding,
        totals.cached,
        totals.recomputed,
        totals.preempted,
        counts.decoding + counts.prefilling,
        used * pages.page_size,
        tokens_spared(pages) if counts.riding > 0 else 0,
    )
    return pack(state), figures
