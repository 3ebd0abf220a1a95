"""The generated tokens of each slot, and when sequences end, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.seeds import mix
from llmbatch.engine.stop_strings import StopTokens, last_characters
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import FinishReason, Step, StepResult


@compiled
def _seeds(given: NDArray[np.int64], base: int, serial: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Choose a seed for each request: its own if given (>= 0), else a hash of `base` and its serial number."""
    seeds = np.empty(given.size, np.uint64)
    for i in range(given.size):
        seeds[i] = np.uint64(given[i]) if given[i] >= 0 else mix(np.uint64(base), serial[i])
    return seeds


class TokenBuffers:
    """Generated tokens of each slot until `pop_tokens` takes them, and the sampling parameters of the requests.

    `eos` are the tokens that end a sequence. `decode` turns token ids into text; requests with stop strings need it.
    `seed` is the seed of requests without one.
    """

    def __init__(
        self, eos: Sequence[int], decode: Callable[[NDArray[np.int32]], str] | None = None, seed: int = 0
    ) -> None:
        self._eos = np.array(eos, np.int32)
        self._decode = decode
        self._stop_tokens = None if decode is None else StopTokens(decode)
        self._seed = seed
        self.tokens: NDArray[np.int32] = np.zeros((16, 64), np.int32)
        self.lengths: NDArray[np.int32] = np.zeros(16, np.int32)
        self.queued: NDArray[np.int32] = np.zeros(16, np.int32)  # with the tokens that are sampled and not yet known

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget what an interrupted job left in slots."""
        self.lengths[:] = self.queued[:] = 0
        self.rebind(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self.requests = requests
        params, index = requests.params, requests.params_index
        self.temperature: NDArray[np.float32] = np.array([p.temperature for p in params], np.float32)[index]
        self.top_k: NDArray[np.int32] = np.array([p.top_k for p in params], np.int32)[index]
        self.top_p: NDArray[np.float32] = np.array([p.top_p for p in params], np.float32)[index]
        self._ignore_eos = np.array([p.ignore_eos for p in params], np.bool_)[index]
        ends = [last_characters(p.stop) for p in params]
        places = {one: i for i, one in enumerate(dict.fromkeys(ends))}
        self._ends = list(places)
        self._ends_index = np.array([places[one] for one in ends], np.int32)[index]
        self._has_stop = np.array([bool(p.stop) for p in params], np.bool_)[index]
        given = np.array([-1 if p.seed is None else p.seed for p in params], np.int64)[index]
        self.seeds: NDArray[np.uint64] = _seeds(given, self._seed, requests.serial)
        assert self._decode is not None or not self._has_stop.any(), "stop strings need a decoder"

    def make_room(self, slots: NDArray[np.int32]) -> None:
        """Grow to the highest slot, and to one more token in each of these slots."""
        have, capacity = self.tokens.shape
        rows, columns = have, capacity
        while rows <= slots.max():
            rows *= 2
        known = slots[slots < have]
        while len(known) and columns <= max(self.lengths[known].max(), self.queued[known].max()):
            columns *= 2
        if (rows, columns) != (have, capacity):
            grown = np.zeros((rows, columns), np.int32)
            grown[:have, :capacity] = self.tokens
            self.tokens = grown
            self.lengths = np.pad(self.lengths, (0, rows - have))
            self.queued = np.pad(self.queued, (0, rows - have))

    def expect(self, step: Step) -> StepResult:
        """Register a step that is about to be computed; returns which sequences will then have all their tokens."""
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        self.queued[slots] += 1
        whole = self.queued[slots] >= self.requests.max_tokens[requests]
        self.queued[slots[whole]] = 0
        finished = np.where(whole, FinishReason.LENGTH, FinishReason.RUNNING).astype(np.uint8)
        return StepResult(tokens=np.zeros(len(slots), np.int32), finished=finished)

    def append(
        self, step: Step, tokens: NDArray[np.int32], finite: NDArray[np.bool_], kept: NDArray[np.bool_] | None = None
    ) -> StepResult:
        """Keep the samples of a step, and return which sequences have ended; `finite`: whether the logits were.

        Samples that are not to be `kept` are ignored.
        """
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        if kept is None:
            kept = np.ones(len(slots), np.bool_)
        noted = slots[kept]
        self.tokens[noted, self.lengths[noted]] = tokens[kept]
        self.lengths[noted] += 1
        finished = np.full(len(slots), FinishReason.RUNNING, np.uint8)
        finished[self.lengths[slots] >= self.requests.max_tokens[requests]] = FinishReason.LENGTH
        finished[np.isin(tokens, self._eos) & ~self._ignore_eos[requests]] = FinishReason.STOP
        for i in self._may_stop(requests, tokens, kept):
            if self._stopped(int(slots[i]), int(requests[i])):
                finished[i] = FinishReason.STOP
        finished[~finite] = FinishReason.ERROR
        finished[~kept] = FinishReason.RUNNING
        return StepResult(tokens=tokens, finished=finished)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        tokens = self.tokens[slot, : self.lengths[slot]].copy()
        self.lengths[slot] = 0
        return tokens

    def _may_stop(
        self, requests: NDArray[np.int32], tokens: NDArray[np.int32], kept: NDArray[np.bool_]
    ) -> NDArray[np.intp]:
        """List the samples whose token can complete one of their request's stop strings."""
        may = self._has_stop[requests] & kept
        if self._stop_tokens is not None and may.any():
            for ends in np.unique(self._ends_index[requests[may]]):
                these = np.flatnonzero(may & (self._ends_index[requests] == ends))
                may[these] = self._stop_tokens.can_complete(self._ends[ends], tokens[these])
        return np.flatnonzero(may)

    def _stopped(self, slot: int, request: int) -> bool:
        """Tell whether the newest token completes one of the request's stop strings."""
        assert self._decode is not None
        stop = self.requests.params[self.requests.params_index[request]].stop
        window = 8 + 4 * max(len(text) for text in stop)  # a character may take four tokens, of a byte each
        length = int(self.lengths[slot])
        tail = self._decode(self.tokens[slot, max(0, length - window) : length])
        return any(text in tail for text in stop)
