"""Which tokens of which requests the next step computes.

One loop serves prefill and decode: a sequence's tokens are its prompt and what it has generated, and it is
behind by the tokens whose KV is not in pages. `decide` gives every decoding sequence its token, hands the rest
of the step's budget to prefills in the order of admission, and admits from the ends of the plan while the
predicted peak of KV stays within the pool. `commit` takes note of what the engine returned. Deciding imports
no torch and reads no clock: a step depends on what came before it and on nothing else.

Chunks that do not end a prompt end on a page boundary, so a page that others may read is always written in the
step that publishes it. When predictions fail, the newest sequences give their pages back and are computed again
later, from the head of the queue (recompute). A request whose prompt and longest answer exceed the pool must
not be enqueued; under that condition a sequence that is alone always ends, so every request does.

No work in a step is proportional to the requests that wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbatch.budget import Budget, Load, Rates
from llmbatch.ends import Account, Candidate, End, Ends, Queue
from llmbatch.engines import Finish, Step, StepResult
from llmbatch.pages import Pages
from llmbatch.peak import Peak
from llmbatch.slots import Slots

MARGIN = 0.03  # of the pool that predictions leave alone


class Lengths(Protocol):
    """Expected lengths of answers (`llmbatch.lengths.LengthModel` learns them)."""

    def remaining(self, requests: NDArray[np.int32], generated: NDArray[np.int32]) -> NDArray[np.float64]:
        """Tokens each request is still expected to generate, given that it has generated some."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is to be admitted, and how. `work` is what is still to do, waiting or running."""

    order: NDArray[np.int32]  # requests; those already admitted are passed over
    lengths: NDArray[np.float64]  # [n] by request: expected tokens of the answer
    ends: Ends
    budget: Budget
    compute: float  # seconds of compute still to do
    memory: float  # seconds of KV reads still to do


@dataclass(frozen=True, slots=True)
class Finished:
    """Sequences that ended in a step, one entry each."""

    requests: NDArray[np.int32]
    slots: NDArray[np.int32]
    reasons: NDArray[np.uint8]
    generated: NDArray[np.int32]  # tokens
    cached: NDArray[np.int32]  # prompt tokens found in pages, recomputation left out


@dataclass(slots=True)
class _Chunks:
    """The prefill part of a step while it is being decided."""

    budget: int
    tokens: int = 0
    by_end: list[int] = field(default_factory=lambda: [0, 0])
    cached: int = 0
    recomputed: int = 0
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)


class Scheduler:
    """Decides steps for one shard. `pages` is its pool; requests are indices into `prompt_lengths`."""

    def __init__(
        self,
        prompt_lengths: NDArray[np.int32],
        *,
        pages: Pages,
        lengths: Lengths,
        rates: Rates,
        max_running: int,
    ) -> None:
        self._prompts = prompt_lengths
        self._pages = pages
        self._lengths = lengths
        self._rates = rates
        self._max_running = max_running
        self._pool = pages.num_pages * pages.page_size
        self._taken = np.zeros(len(prompt_lengths), np.bool_)
        self._queue = Queue(np.empty(0, np.int32), self._taken)
        self._slots = Slots()
        self._peak = Peak()
        self._held = [0.0, 0.0]  # expected KV by end
        self._decoding: NDArray[np.int32] = np.empty(0, np.int32)  # slots
        self._prefilling: list[int] = []  # slots, in order of admission
        self._preempted: deque[int] = deque()  # slots, oldest first
        self._admissions = 0
        self.steps = 0
        self.preemptions = 0

    def enqueue(self, waiting: Waiting) -> None:
        """Replace what waits; running sequences go on."""
        self._queue = Queue(waiting.order, self._taken)
        self._waiting = waiting
        self._compute_left, self._memory_left = waiting.compute, waiting.memory

    @property
    def waiting(self) -> bool:
        """Whether requests wait to be admitted."""
        return bool(self._queue)

    @property
    def running(self) -> int:
        """Sequences admitted and not ended."""
        return len(self._decoding) + len(self._prefilling) + len(self._preempted)

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._queue and self.running == 0

    def unfinished(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Requests admitted and not ended, and the tokens each has generated."""
        slots = np.array([*self._decoding, *self._prefilling, *self._preempted], np.int32)
        return self._slots.request[slots], self._generated(slots)

    def decide(self) -> Step:
        """The next step. There must be something to do."""
        assert not self.done, "there is nothing left to decide"
        preempted = self._make_room_for_decodes()
        self._extend_overdue()
        decodes = self._decoding
        self._pages.extend_decodes(decodes, self._slots.computed[decodes])
        chunks = _Chunks(self._tokens() - len(decodes))
        if all(self._chunk(slot, chunks) for slot in self._prefilling):
            self._admit(chunks)
        if not chunks.slots and len(decodes) == 0:
            preempted += self._unblock(chunks)
        return self._freeze(chunks, preempted)

    def commit(self, step: Step, result: StepResult) -> Finished:
        """Take note of an executed step; returns the sequences that ended, whose slots are free again."""
        slots = self._slots
        self.steps += 1
        self._charge(step)
        sampled = step.slots[step.samples]
        ended = result.finished != Finish.RUNNING
        slots.computed[step.slots] += step.counts
        slots.reached[step.slots] = np.maximum(slots.reached[step.slots], slots.computed[step.slots])
        slots.known[sampled] += 1
        self._start_decoding(sampled[step.num_decodes :], ended[step.num_decodes :])
        gone = sampled[ended]
        finished = Finished(
            slots.request[gone], gone, result.finished[ended], self._generated(gone), slots.cached[gone]
        )
        if len(gone):
            self._decoding = self._decoding[~np.isin(self._decoding, gone)]
            for slot in gone.tolist():
                self._pages.release(slot)
                self._peak.remove(slot)
                self._held[slots.end[slot]] -= slots.weight[slot]
                slots.give(slot)
        return finished

    def check(self) -> None:
        """Verify that the books agree with the pages; raises AssertionError."""
        self._pages.check()
        running = [*self._decoding.tolist(), *self._prefilling]
        assert len({*running, *self._preempted}) == self.running, "a slot stands in two places"
        assert len(self._peak) == len(running), "the forecast counts other sequences than those that run"
        for slot in running:
            held = int(self._pages.held[slot]) * self._pages.page_size
            assert self._pages.request[slot] == self._slots.request[slot], "pages belong to another request"
            assert held >= self._slots.computed[slot], "tokens are computed that have no page"
            assert self._slots.computed[slot] < self._slots.known[slot], "a sequence has nothing to compute"
        for slot in self._preempted:
            assert self._pages.request[slot] < 0, "a preempted slot holds pages"

    # Pages for what runs.

    def _make_room_for_decodes(self) -> int:
        """Preempt the newest until every decoding sequence can have its next page."""
        preempted = 0
        while True:
            decodes = self._decoding
            full = self._pages.held[decodes] * self._pages.page_size <= self._slots.computed[decodes]
            if np.count_nonzero(full) <= self._pages.available:
                return preempted
            running = np.concatenate([decodes, np.array(self._prefilling, np.int32)])
            self._preempt(int(running[np.argmax(self._slots.admitted[running])]))
            preempted += 1

    def _preempt(self, slot: int) -> None:
        if self._prefilling and self._prefilling[-1] == slot:
            self._prefilling.pop()
        else:
            self._decoding = self._decoding[self._decoding != slot]
        self._pages.release(slot, again=True)
        self._peak.remove(slot)
        self._slots.computed[slot] = 0
        self._preempted.appendleft(slot)
        self.preemptions += 1

    def _extend_overdue(self) -> None:
        """Expect anew of sequences that outlived their estimate; they belong to the right end's account."""
        overdue = self._peak.overdue(self.steps)
        if len(overdue) == 0:
            return
        slots = self._slots
        for slot in overdue.tolist():
            self._held[slots.end[slot]] -= slots.weight[slot]
            self._held[End.RIGHT] += slots.weight[slot]
        slots.end[overdue] = End.RIGHT
        self._expect(overdue)

    def _expect(self, slots: NDArray[np.int32]) -> None:
        """Forecast sequences that run by what they are still expected to generate."""
        for slot, tokens in zip(slots.tolist(), self._remaining(slots).tolist(), strict=True):
            self._peak.remove(slot)
            self._forecast(slot, self.steps, tokens)

    def _forecast(self, slot: int, start: float, tokens: float) -> None:
        base = self._private(int(self._slots.request[slot]), int(self._slots.known[slot])) - start
        self._peak.add(slot, start + max(tokens, 1.0), base)

    def _private(self, request: int, tokens: int) -> int:
        """KV tokens of a sequence beside the shareable pages of its prompt, a page more for rounding."""
        return tokens + (1 - int(self._pages.trie.depth[request])) * self._pages.page_size

    # Prefill.

    def _tokens(self) -> int:
        decodes = self._decoding
        load = Load(
            decodes=len(decodes),
            kv_tokens=int(self._slots.known[decodes].sum()),
            kv_fraction=self._pages.used / self._pages.num_pages,
            compute_left=self._compute_left,
            memory_left=self._memory_left,
        )
        return self._waiting.budget.tokens(load)

    def _chunk(self, slot: int, chunks: _Chunks) -> bool:
        """Give a prefilling slot the chunk that budget and pages allow; False when that is none."""
        pages, slots = self._pages, self._slots
        size = pages.page_size
        known = int(slots.known[slot])
        if slots.computed[slot] % size == 0:
            self._found(slot, pages.adopt(slot, known), chunks)
        start = int(slots.computed[slot])
        room = int(pages.held[slot] + pages.available) * size - start
        count = min(known - start, chunks.budget - chunks.tokens, room)
        if start + count < known:
            count = (start + count) // size * size - start
        if count <= 0:
            return False
        pages.extend(slot, start + count)
        chunks.slots.append(slot)
        chunks.counts.append(count)
        chunks.samples.append(start + count == known)
        chunks.tokens += count
        chunks.by_end[slots.end[slot]] += count
        chunks.recomputed += max(0, min(int(slots.reached[slot]) - start, count))
        return True

    def _found(self, slot: int, tokens: int, chunks: _Chunks) -> None:
        """Take tokens found in pages as computed; those found for the first time count as cached."""
        slots = self._slots
        fresh = max(0, min(tokens, int(self._prompts[slots.request[slot]])) - int(slots.reached[slot]))
        slots.cached[slot] += fresh
        slots.reached[slot] += fresh
        slots.computed[slot] = tokens
        chunks.cached += fresh

    def _unblock(self, chunks: _Chunks) -> int:
        """Nothing could go on: the newest give way until the oldest has a page."""
        preempted = 0
        chunks.budget = max(chunks.budget, self._pages.page_size)
        if not self._prefilling:
            self._admit(chunks)
        while not chunks.slots and not self._chunk(self._prefilling[0], chunks):
            self._preempt(self._prefilling[-1])
            preempted += 1
        return preempted

    # Admission.

    def _admit(self, chunks: _Chunks) -> None:
        going_on = True
        while going_on and chunks.tokens < chunks.budget:
            if self._preempted:
                going_on = self._admit_again(chunks)
            elif self._queue and self.running < self._max_running:
                going_on = self._admit_next(chunks)
            else:
                return

    def _admit_again(self, chunks: _Chunks) -> bool:
        slot = self._preempted[0]
        tokens = float(self._remaining(np.array([slot], np.int32))[0])
        known = int(self._slots.known[slot])
        if not self._fits(int(self._slots.request[slot]), known, tokens, 0.0, chunks):
            return False
        self._preempted.popleft()
        return self._enter(slot, tokens, chunks)

    def _admit_next(self, chunks: _Chunks) -> bool:
        left, right = self._candidate(End.LEFT), self._candidate(End.RIGHT)
        account = Account(
            pool=self._pool,
            budget=chunks.budget,
            prefilled=(chunks.by_end[0], chunks.by_end[1]),
            running=self.running,
            held=(self._held[0], self._held[1]),
            left=left,
            right=right,
        )
        for end, reserve in self._waiting.ends.turns(account):
            one = left if end is End.LEFT else right
            if self._fits(one.request, one.prompt, one.length, reserve, chunks):
                weight = one.prompt + one.length / 2
                self._queue.take(end)
                self._held[end] += weight
                return self._enter(self._slots.take(one.request, one.prompt, end, weight), one.length, chunks)
        return False

    def _candidate(self, end: End) -> Candidate:
        request = self._queue.peek(end)
        length = float(self._waiting.lengths[request])
        return Candidate(request, self._queue.position(end), int(self._prompts[request]), length)

    def _fits(self, request: int, known: int, tokens: float, reserve: float, chunks: _Chunks) -> bool:
        """Whether the predicted peak stays within the pool if the request enters now."""
        if self.running == len(self._preempted):
            return True
        if self._pages.available == 0:
            return False
        used, depth = self._pages.probe(request)
        start = self.steps + 1.0 + known / max(chunks.budget, 1)
        peak = self._peak.most(start + max(tokens, 1.0), self._private(request, known) - start)
        shared = (self._pages.shared + depth - used) * self._pages.page_size
        return peak + shared <= self._pool * (1 - MARGIN) - reserve

    def _enter(self, slot: int, tokens: float, chunks: _Chunks) -> bool:
        known = int(self._slots.known[slot])
        found = self._pages.admit(slot, int(self._slots.request[slot]), known)
        self._found(slot, found, chunks)
        self._slots.admitted[slot] = self._admissions
        self._admissions += 1
        self._prefilling.append(slot)
        self._forecast(slot, self.steps + 1.0 + known / max(chunks.budget, 1), tokens)
        return self._chunk(slot, chunks)

    # Accounts.

    def _generated(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        return (self._slots.known[slots] - self._prompts[self._slots.request[slots]]).astype(np.int32)

    def _remaining(self, slots: NDArray[np.int32]) -> NDArray[np.float64]:
        return self._lengths.remaining(self._slots.request[slots], self._generated(slots))

    def _charge(self, step: Step) -> None:
        """Take a step's work from what is left to do."""
        read = int(step.starts[: step.num_decodes].sum()) + step.num_decodes
        fresh = step.num_tokens - step.recomputed_tokens
        self._compute_left = max(0.0, self._compute_left - fresh * self._rates.seconds_per_token)
        self._memory_left = max(0.0, self._memory_left - read * self._rates.seconds_per_kv_token)

    def _start_decoding(self, sampled: NDArray[np.int32], ended: NDArray[np.bool_]) -> None:
        """Move prefills that have been sampled to the decodes."""
        if len(sampled) == 0:
            return
        moved = set(sampled.tolist())
        self._prefilling = [slot for slot in self._prefilling if slot not in moved]
        self._decoding = np.concatenate([self._decoding, sampled])
        self._expect(sampled[~ended])

    def _freeze(self, chunks: _Chunks, preempted: int) -> Step:
        decodes = self._decoding
        slots = np.concatenate([decodes, np.array(chunks.slots, np.int32)])
        ones = np.ones(len(decodes), np.int32)
        return Step(
            index=self.steps,
            num_decodes=len(decodes),
            slots=slots,
            requests=self._slots.request[slots],
            starts=self._slots.computed[slots],
            counts=np.concatenate([ones, np.array(chunks.counts, np.int32)]),
            samples=np.concatenate([ones.astype(np.bool_), np.array(chunks.samples, np.bool_)]),
            block_tables=self._pages.tables,
            cached_tokens=chunks.cached,
            recomputed_tokens=chunks.recomputed,
            preempted=preempted,
        )
