"""The torch engine: transformers models over pages.

All sequences of a step are packed into one row of tokens. The model runs once over the row; its attention modules
write the row's keys and values into pages and attend through the step's block tables.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from llmbatch.engines import Finish, Step, StepResult
from llmbatch.engines.context import Pages, StepAttention
from llmbatch.engines.loading import LoadedModel
from llmbatch.engines.sampler import mix, sample
from llmbatch.memory import keep_freed_memory
from llmbatch.requests import Requests

_WORTH_THREADS = 1 << 16  # elements a layer touches; below, waking threads costs more than they save


@njit(cache=True)
def _pack(
    prompts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    generated: NDArray[np.int32],
    slots: NDArray[np.int32],
    requests: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    tables: NDArray[np.int32],
    page_size: int,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    pages: NDArray[np.int32],
    places: NDArray[np.int32],
) -> None:
    """Token, position, page and place in the page of each packed token."""
    t = 0
    for i in range(slots.size):
        begin = offsets[requests[i]]
        prompt_length = offsets[requests[i] + 1] - begin
        slot = slots[i]
        for position in range(starts[i], starts[i] + counts[i]):
            if position < prompt_length:
                ids[t] = prompts[begin + position]
            else:
                ids[t] = generated[slot, position - prompt_length]
            positions[t] = position
            pages[t] = tables[slot, position // page_size]
            places[t] = position % page_size
            t += 1


@njit(cache=True)
def _seeds(given: NDArray[np.int64], base: int, serial: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A seed for each request: its own where given (>= 0), else a hash of `base` and its serial number."""
    seeds = np.empty(given.size, np.uint64)
    for i in range(given.size):
        seeds[i] = np.uint64(given[i]) if given[i] >= 0 else mix(np.uint64(base), serial[i])
    return seeds


class TorchEngine:
    """Runs steps of a loaded model. It owns the KV pages, and the generated tokens of each slot until retired.

    `decode` turns token ids into text; it is needed by requests that have stop strings. `seed` is the seed of
    requests that have none of their own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        page_size: int,
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        seed: int = 0,
    ) -> None:
        keep_freed_memory()
        self._module = loaded.module
        self._eos = np.array(loaded.eos_token_ids, np.int32)
        self._pages = Pages(loaded.attention, num_pages=num_pages, page_size=page_size, dtype=loaded.dtype)
        self._decode = decode
        self._seed = seed
        self._generated = np.zeros((16, 64), np.int32)
        self._lengths = np.zeros(16, np.int32)
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self._threads = min(torch.get_num_threads(), most)
        self._token_elements = loaded.config.hidden_size
        self._key_elements = max(2 * spec.heads * spec.width for spec in loaded.attention.values())

    def begin(self, requests: Requests) -> None:
        """Take the requests that the next steps are about; what an interrupted job left in slots is forgotten."""
        self._lengths[:] = 0
        self.go_on(requests)

    def go_on(self, requests: Requests) -> None:
        """Take other requests, among which are those that are in slots."""
        self._requests = requests
        params, index = requests.params, requests.params_index
        self._prompt_lengths = requests.prompt_lengths
        self._temperature = np.array([p.temperature for p in params], np.float32)[index]
        self._top_k = np.array([p.top_k for p in params], np.int32)[index]
        self._top_p = np.array([p.top_p for p in params], np.float32)[index]
        self._ignore_eos = np.array([p.ignore_eos for p in params], np.bool_)[index]
        self._has_stop = np.array([bool(p.stop) for p in params], np.bool_)[index]
        given = np.array([-1 if p.seed is None else p.seed for p in params], np.int64)[index]
        self._seeds = _seeds(given, self._seed, requests.serial)
        assert self._decode is not None or not self._has_stop.any(), "stop strings need a decoder"

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and say which sequences have finished."""
        self._make_room(step.slots)
        tokens = step.num_tokens
        ids, positions = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        pages, places = np.empty(tokens, np.int32), np.empty(tokens, np.int32)
        _pack(
            self._requests.tokens, self._requests.offsets, self._generated, step.slots, step.requests,
            step.starts, step.counts, step.block_tables, self._pages.page_size, ids, positions, pages, places,
        )  # fmt: skip
        attention = StepAttention(
            self._pages,
            tables=step.block_tables,
            slots=step.slots,
            starts=step.starts,
            counts=step.counts,
            token_pages=pages,
            token_offsets=places,
        )
        keys = int(step.starts.sum()) + tokens
        elements = tokens * self._token_elements + keys * self._key_elements
        numba.set_num_threads(self._threads if elements >= _WORTH_THREADS else 1)
        last_rows = np.cumsum(step.counts, dtype=np.int64)[step.samples] - 1
        with torch.inference_mode():
            logits = self._module(
                input_ids=torch.from_numpy(ids)[None],
                position_ids=torch.from_numpy(positions)[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(last_rows),
                llmbatch=attention,
            ).logits[0]
            return self._sample(step, logits.float().contiguous().numpy())

    def retire(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        tokens = self._generated[slot, : self._lengths[slot]].copy()
        self._lengths[slot] = 0
        return tokens

    def _make_room(self, slots: NDArray[np.int32]) -> None:
        """Grow to the highest slot, and to one more token in each slot of the step."""
        have, capacity = self._generated.shape
        rows, columns = have, capacity
        while rows <= slots.max():
            rows *= 2
        known = slots[slots < have]
        while len(known) and columns <= self._lengths[known].max():
            columns *= 2
        if (rows, columns) != (have, capacity):
            grown = np.zeros((rows, columns), np.int32)
            grown[:have, :capacity] = self._generated
            self._generated = grown
            self._lengths = np.pad(self._lengths, (0, rows - have))

    def _sample(self, step: Step, logits: NDArray[np.float32]) -> StepResult:
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        tokens, finite = np.empty(len(slots), np.int32), np.empty(len(slots), np.bool_)
        sample(
            logits, self._temperature[requests], self._top_k[requests], self._top_p[requests],
            self._seeds[requests], self._lengths[slots], tokens, finite,
        )  # fmt: skip
        self._generated[slots, self._lengths[slots]] = tokens
        self._lengths[slots] += 1
        finished = np.full(len(slots), Finish.RUNNING, np.uint8)
        finished[self._lengths[slots] >= self._requests.max_tokens[requests]] = Finish.LENGTH
        finished[np.isin(tokens, self._eos) & ~self._ignore_eos[requests]] = Finish.STOP
        for i in np.flatnonzero(self._has_stop[requests]):
            if self._stopped(int(slots[i]), int(requests[i])):
                finished[i] = Finish.STOP
        finished[~finite] = Finish.ERROR
        return StepResult(tokens=tokens, finished=finished)

    def _stopped(self, slot: int, request: int) -> bool:
        """Whether the newest token completes one of the request's stop strings."""
        assert self._decode is not None
        stop = self._requests.params[self._requests.params_index[request]].stop
        window = 8 + 4 * max(len(text) for text in stop)  # a character may take four tokens, of a byte each
        length = int(self._lengths[slot])
        tail = self._decode(self._generated[slot, max(0, length - window) : length])
        return any(text in tail for text in stop)
