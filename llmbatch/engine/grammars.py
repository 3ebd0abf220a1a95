"""Which tokens the form of an answer allows next, for the rows that have one.

A grammar is compiled when the first sequence with it begins, and each sequence gets a copy of its state. The grammars
of the last sequences stay compiled: a job may have one for each row, and each takes some 200 KB. The state takes every
token as it is kept. So the masks of a step are known before it begins, and a thread beside the forward writes them: one
bit a token, 6 KB for a vocabulary of 49,152. They are applied to the logits before a token is chosen. Where a mask
allows one token alone, that token is taken: nothing is drawn.

A sequence ends when its grammar allows no more. Tokens that a grammar forces behind a sampled one are known at once
(docs/decisions/0070).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import FinishReason
from llmbatch.structured import Structure

_THREADS: Final = 2
_KEPT: Final = 256  # compiled grammars


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step's rows that have a form."""

    rows: NDArray[np.intp]  # of the logits
    bits: NDArray[np.uint32]  # [rows, words] a bit for each token


class Grammars:
    """The states of the grammars of sequences, by slot. `vocabulary` makes llguidance's tokenizer, once."""

    def __init__(self, vocabulary: Callable[[], Any]) -> None:
        self._make_vocabulary = vocabulary
        self._vocabulary: Any = None
        self._executor: Any = None
        self._compiled = lru_cache(_KEPT)(self._compile)
        self._states: dict[int, tuple[int, Any]] = {}  # by slot: the request, and its grammar's state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._has: NDArray[np.bool_] = np.zeros(0, np.bool_)  # by request
        self._requests: RequestBatch | None = None

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget the states of slots."""
        self._states.clear()
        self.rebind(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; states stay with their slots."""
        self._has = np.zeros(len(requests), np.bool_)
        self.extend(requests, np.arange(len(requests), dtype=np.int32))

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into `rows` since. Raises ModelError where forms lack a tokenizer."""
        self._requests = requests
        numbers, place = np.unique(requests.params_index[rows], return_inverse=True)
        has = [requests.params[number].structured_outputs is not None for number in numbers.tolist()]
        self._has[rows] = np.array(has, np.bool_)[place]
        if any(has) and self._vocabulary is None:
            from llguidance import LLExecutor

            self._vocabulary = self._make_vocabulary()
            self._executor = LLExecutor(_THREADS)

    def masks(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> Future[Masks] | None:
        """Write the masks of sequences that are sampled next, in a thread; None where none has a form."""
        rows = np.flatnonzero(self._has[requests])
        if not len(rows):
            return None
        states = [self._state(int(slots[row]), int(requests[row])) for row in rows]
        return self._thread.submit(self._write, rows, states)

    def take(self, slot: int, request: int, token: int) -> FinishReason:
        """Take a token that a sequence has now, and say whether it ends so: its form allows no more, or is too large.

        How large the states of a grammar become is known when they are reached. llguidance follows them to a bound.
        """
        state = self._state(slot, request)
        state.consume_token(token)
        if state.is_error():
            return FinishReason.ERROR
        return FinishReason.STOP if state.is_stopped() else FinishReason.RUNNING

    def forced(self, slot: int, request: int) -> list[int]:
        """List the next tokens of a sequence up to the first that its form leaves a choice about."""
        tokens: list[int] = self._state(slot, request).compute_ff_tokens()
        return tokens

    def has(self, requests: NDArray[np.int32]) -> NDArray[np.intp]:
        """Find which of some requests have a form."""
        return np.flatnonzero(self._has[requests])

    def drop(self, slot: int) -> None:
        """Forget the state of a slot."""
        self._states.pop(slot, None)

    def _state(self, slot: int, request: int) -> Any:
        if slot not in self._states:
            assert self._requests is not None
            structure = self._requests.params[self._requests.params_index[request]].structured_outputs
            assert structure is not None
            state = self._compiled(structure).deep_copy()
            if self._requests.begun[request]:
                state.consume_tokens(self._requests.begun_tokens(request).tolist())
            self._states[slot] = (request, state)
        return self._states[slot][1]

    def _compile(self, structure: Structure) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(self._vocabulary, structure.grammar(), log_level=0)

    def _write(self, rows: NDArray[np.intp], states: list[Any]) -> Masks:
        bits = np.zeros((len(rows), -(-self._vocabulary.vocab_size // 32)), np.uint32)
        self._executor.unsafe_compute_mask_ptr(
            [(state, at) for at, state in enumerate(states)], bits.ctypes.data, bits.strides[0], len(bits)
        )
        return Masks(rows, bits)


def apply_masks(logits: NDArray[np.float32], masks: Masks) -> None:
    """Exclude the tokens that are not allowed, in place."""
    _exclude(logits, masks.rows, masks.bits)


@compiled(nogil=True)
def _exclude(logits: Any, rows: Any, bits: Any) -> None:
    for at in range(len(rows)):
        row, words = logits[rows[at]], bits[at]
        for word in range(len(words)):
            allowed = words[word]
            if allowed == np.uint32(0xFFFFFFFF):
                continue
            for bit in range(32):
                token = 32 * word + bit
                if token < row.size and not (allowed >> np.uint32(bit)) & np.uint32(1):
                    row[token] = -np.inf
        for token in range(32 * len(words), row.size):
            row[token] = -np.inf
