"""The generated tokens of each slot, and when sequences end, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.generation.append import append_tokens, find_room
from llmbatch.engine.generation.columns import SamplingColumns
from llmbatch.engine.generation.stop_strings import StopTokens, find_stop, known_characters, last_characters
from llmbatch.engine.grammars import Grammars
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """What the samples of a step are, one entry each."""

    tokens: NDArray[np.int32]
    finite: NDArray[np.bool_]  # whether the logits were
    told: NDArray[np.int32] | None = None  # [samples, places] tokens whose log-probabilities are told, -1: no more
    logprobs: NDArray[np.float32] | None = None  # [samples, places] of the chosen one, and of the likeliest ones


class TokenBuffers:
    """Generated tokens of each slot until `pop_tokens` takes them, and the sampling parameters of the requests.

    `eos` are the tokens that end a sequence. `decode` turns token ids into text; requests with stop strings need it.
    `seed` is the seed of requests without one. Requests whose answers have a form need `grammars`.
    """

    def __init__(
        self,
        eos: Sequence[int],
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        seed: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars: Grammars | None = grammars
        self._eos = np.array(eos, np.int32)
        self._decode = decode
        self._stop_tokens = None if decode is None else StopTokens(decode)
        self._seed = seed
        self.tokens: NDArray[np.int32] = np.zeros((16, 64), np.int32)
        self._told: NDArray[np.int32] = np.zeros((16, 64, 0), np.int32)  # as `TokenLogprobs`, by slot
        self._logprobs: NDArray[np.float32] = np.zeros((16, 64, 0), np.float32)
        self._prompts: dict[int, TokenLogprobs] = {}  # by slot
        self.lengths: NDArray[np.int32] = np.zeros(16, np.int32)
        self.queued: NDArray[np.int32] = np.zeros(16, np.int32)  # with the tokens that are sampled and not yet known

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget what an interrupted job left in slots."""
        self.lengths[:] = self.queued[:] = 0
        self._prompts.clear()
        if self.grammars is not None:
            self.grammars.begin(requests)
        self.rebind(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self.requests = requests
        self.most: NDArray[np.int32] = requests.max_tokens + requests.begun  # tokens of each whole answer
        self._goes_on = bool(requests.begun.any())
        if self.grammars is not None:
            self.grammars.rebind(requests)
        self.columns: SamplingColumns = SamplingColumns.of(requests, self._eos.tolist(), self._seed)
        self._ignore_eos = self._has_stop = np.empty(0, np.bool_)  # by number of parameters
        self._ends_index = np.empty(0, np.int32)  # into `_ends`, likewise
        self._ends: list[str] = []
        self._note(requests.params)

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since."""
        self.requests = requests
        self.most[rows] = requests.max_tokens[rows] + requests.begun[rows]
        if self.grammars is not None:
            self.grammars.extend(requests, rows)
        self.columns = self.columns.extended(requests, rows, self._eos.tolist(), self._seed)
        self._note(requests.params[len(self._has_stop) :])

    def _note(self, params: Sequence[SamplingParams]) -> None:
        """Take note of further parameters."""
        for p in params:
            assert self._decode is not None or not p.stop, "stop strings need a decoder"
        self._widen(1 + max((p.logprobs for p in params if p.logprobs is not None), default=-1))
        ends = [last_characters(p.stop) for p in params]
        self._ends = list(dict.fromkeys((*self._ends, *ends)))
        places = {one: i for i, one in enumerate(self._ends)}

        def with_more(column: NDArray[Any], values: list[Any]) -> NDArray[Any]:
            return np.concatenate((column, np.array(values, column.dtype)))

        self._ignore_eos = with_more(self._ignore_eos, [p.ignore_eos for p in params])
        self._has_stop = with_more(self._has_stop, [bool(p.stop) for p in params])
        self._stops = bool(self._has_stop.any())
        self._ends_index = with_more(self._ends_index, [places[one] for one in ends])

    def recall(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> None:
        """Give slots the tokens that their answers begin with, before their first own tokens are chosen."""
        if not self._goes_on:
            return
        for i in np.flatnonzero((self.lengths[slots] == 0) & (self.requests.begun[requests] > 0)).tolist():
            tokens, slot = self.requests.begun_tokens(int(requests[i])), slots[i]
            self.make_room(slots[i : i + 1], len(tokens) + 1)
            self.tokens[slot, : len(tokens)] = tokens
            self.lengths[slot] = len(tokens)

    def enqueue(self, step: Step) -> None:
        """Make room for a step's tokens, which are counted from those that its answers begin with.

        A slot may still hold what ended there: it is given these tokens (`recall`) when the step is collected.
        """
        self.make_room(step.slots)
        begun = self.requests.begun[step.requests]
        fresh = (self.queued[step.slots] == 0) & (begun > 0)
        if fresh.any():
            self.queued[step.slots[fresh]] = begun[fresh]
            self.make_room(step.slots)

    def make_room(self, slots: NDArray[np.int32], more: int = 1) -> None:
        """Grow to the highest slot, and to some `more` tokens in each of these slots."""
        have, capacity = self.tokens.shape
        highest, tokens = find_room(slots, self.lengths, self.queued)
        rows, columns = have, capacity
        while rows <= highest:
            rows *= 2
        while columns < tokens + more:
            columns *= 2
        if (rows, columns) != (have, capacity):
            grown = np.zeros((rows, columns), np.int32)
            grown[:have, :capacity] = self.tokens
            self.tokens = grown
            added = ((0, rows - have), (0, columns - capacity), (0, 0))
            self._told, self._logprobs = np.pad(self._told, added), np.pad(self._logprobs, added)
            self.lengths = np.pad(self.lengths, (0, rows - have))
            self.queued = np.pad(self.queued, (0, rows - have))

    def expect(self, step: Step) -> StepResult:
        """Register a step that is about to be computed; returns which sequences will then have all their tokens."""
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        self.queued[slots] += 1
        whole = self.queued[slots] >= self.most[requests]
        self.queued[slots[whole]] = 0
        finished = np.where(whole, FinishReason.LENGTH, FinishReason.RUNNING).astype(np.uint8)
        return StepResult(tokens=np.zeros(len(slots), np.int32), finished=finished)

    def append(self, step: Step, chosen: TokenChoices, kept: NDArray[np.bool_] | None = None) -> StepResult:
        """Keep the samples of a step and what they force, and return which sequences have ended.

        Samples that are not to be `kept` are ignored.
        """
        slots, requests, tokens = step.slots[step.samples], step.requests[step.samples], chosen.tokens
        if chosen.told is not None and chosen.logprobs is not None:
            noted, these = (slots, slice(None)) if kept is None else (slots[kept], kept)
            places = chosen.told.shape[1]
            self._told[noted, self.lengths[noted], :places] = chosen.told[these]
            self._told[noted, self.lengths[noted], places:] = -1
            self._logprobs[noted, self.lengths[noted], :places] = chosen.logprobs[these]
        if kept is None:
            finished = self._add(slots, requests, tokens, chosen.finite)
        else:
            finished = np.full(len(slots), FinishReason.RUNNING, np.uint8)
            finished[kept] = self._add(slots[kept], requests[kept], tokens[kept], chosen.finite[kept])
        return StepResult(tokens=tokens, finished=finished, forced=self._force(slots, requests, kept, finished))

    def note_prompt(self, slot: int, request: int, place: int, told: TokenLogprobs) -> None:
        """Keep what is told of some tokens of a prompt, from a `place` on among all that are told of.

        `told` has the places that any prompt of the step wants, of which this one keeps those that it wants.
        """
        places = 1 + int(self.columns.prompt_logprobs[request])
        if slot not in self._prompts:
            wanted = int(self.requests.prompt_lengths[request] - self.requests.scored[request])
            self._prompts[slot] = TokenLogprobs(
                np.full((wanted, places), -1, np.int32), np.zeros((wanted, places), np.float32)
            )
        kept = self._prompts[slot]
        kept.tokens[place : place + len(told.tokens)] = told.tokens[:, :places]
        kept.values[place : place + len(told.tokens)] = told.values[:, :places]

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Return what is told of a request's answer and of its prompt, before `pop_tokens`; None where nothing is."""
        answer = None
        if self.columns.logprobs[request] >= 0:
            length = self.lengths[slot]
            answer = TokenLogprobs(self._told[slot, :length].copy(), self._logprobs[slot, :length].copy())
        return answer, self._prompts.get(slot)

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens of the answer in a slot so far, as far as they are known."""
        return self.tokens[slot, : self.lengths[slot]].copy() if slot < len(self.lengths) else np.empty(0, np.int32)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        tokens = self.generated(slot)
        self.lengths[slot] = 0
        self._prompts.pop(slot, None)
        if self.grammars is not None:
            self.grammars.drop(slot)
        return tokens

    def _add(
        self,
        slots: NDArray[np.int32],
        requests: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finite: NDArray[np.bool_],
    ) -> NDArray[np.uint8]:
        """Append a token to each of some sequences; returns which have ended with it, a `FinishReason` each."""
        finished = np.empty(len(slots), np.uint8)
        endings = self.columns.endings
        append_tokens(
            self.tokens, self.lengths, slots, requests, tokens, finite, self.most, self.columns.min_tokens,
            self.requests.params_index, self._ignore_eos, len(self._eos), endings.tokens, endings.offsets, finished,
        )  # fmt: skip  # arguments in groups
        if self._stops:
            for i in self._may_stop(requests, tokens, finite & self._may_end(slots, requests)):
                if self._stopped(int(slots[i]), int(requests[i])):
                    finished[i] = FinishReason.STOP
        if self.grammars is not None:
            for i in self.grammars.has(requests).tolist():
                if finite[i]:
                    ends = self.grammars.take(int(slots[i]), int(requests[i]), int(tokens[i]))
                    finished[i] = finished[i] if ends == FinishReason.RUNNING else ends
        return finished

    def _may_end(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Tell which sequences have as many tokens as they must."""
        free: NDArray[np.bool_] = self.lengths[slots] >= self.columns.min_tokens[requests]
        return free

    def _force(
        self,
        slots: NDArray[np.int32],
        requests: NDArray[np.int32],
        kept: NDArray[np.bool_] | None,
        finished: NDArray[np.uint8],
    ) -> ForcedTokens | None:
        """Append the tokens that grammars force behind those of a step, as if they were sampled; None: there are none.

        A row whose log-probabilities are told samples them all, as they need logits. Before its `min_tokens` a row
        samples, too: what would end it is excluded there.
        """
        if self.grammars is None or not len(rows := self.grammars.has(requests)):
            return None
        at, of = slots[rows], requests[rows]
        runs = (finished[rows] == FinishReason.RUNNING) & (True if kept is None else kept[rows])
        rows = rows[runs & (self.columns.logprobs[of] < 0) & self._may_end(at, of)]
        forced = [self.grammars.forced(int(slots[i]), int(requests[i])) for i in rows]
        counts = np.array([len(tokens) for tokens in forced], np.int32)
        if not counts.any():
            return None
        self.make_room(slots[rows], int(counts.max()))
        taken = np.zeros(len(slots), np.int32)
        for place in range(counts.max()):
            (going,) = np.nonzero((counts > place) & (finished[rows] == FinishReason.RUNNING))
            tokens = np.array([forced[i][place] for i in going], np.int32)
            these = rows[going]
            finished[these] = self._add(slots[these], requests[these], tokens, np.ones(len(these), np.bool_))
            taken[these] += 1
        found = [tokens[: taken[i]] for i, tokens in zip(rows, forced, strict=True)]
        return ForcedTokens(taken, np.array(list(chain.from_iterable(found)), np.int32))

    def _widen(self, places: int) -> None:
        """Have room to tell of so many tokens in each place."""
        if places > self._told.shape[2]:
            more = ((0, 0), (0, 0), (0, places - self._told.shape[2]))
            self._told = np.pad(self._told, more, constant_values=-1)
            self._logprobs = np.pad(self._logprobs, more)

    def _may_stop(
        self, requests: NDArray[np.int32], tokens: NDArray[np.int32], kept: NDArray[np.bool_]
    ) -> NDArray[np.intp]:
        """List the samples whose token can complete one of their request's stop strings."""
        params = self.requests.params_index[requests]
        may = self._has_stop[params] & kept
        if self._stop_tokens is not None and may.any():
            index = self._ends_index[params]
            for ends in np.unique(index[may]):
                these = np.flatnonzero(may & (index == ends))
                may[these] = self._stop_tokens.can_complete(self._ends[ends], tokens[these])
        return np.flatnonzero(may)

    def _stopped(self, slot: int, request: int) -> bool:
        """Tell whether the newest token completes one of the request's stop strings."""
        stop = self.requests.params[self.requests.params_index[request]].stop
        length, least = int(self.lengths[slot]), int(self.columns.min_tokens[request])
        window = 8 + 4 * max(len(text) for text in stop)  # a character may take four tokens, of a byte each
        while True:
            begin = max(0, length - window)
            tail = self._text(slot, begin, length)
            free = known_characters(self._text(slot, begin, least - 1)) if begin < least - 1 else 0
            if find_stop(tail, stop, free) >= 0:
                return True
            if begin == 0 or len(tail) >= window // 4:
                return False
            window *= 4  # most of these tokens have no text

    def _text(self, slot: int, begin: int, end: int) -> str:
        assert self._decode is not None
        return self._decode(self.tokens[slot, begin:end])
