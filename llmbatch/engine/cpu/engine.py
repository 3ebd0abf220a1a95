"""The engine of the processor: transformers models over pages.

All sequences of a step are packed into one row of tokens. The model runs once over the row; its attention modules write
the row's keys and values into pages and attend through the step's block tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache
from llmbatch.engine.cpu.sampler import sample
from llmbatch.engine.generation import TokenBuffers
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.packing import pack_tokens
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step, StepResult

_WORTH_THREADS = 1 << 16  # elements a layer touches; below, waking threads costs more than they save


class CpuEngine:
    """Runs steps of a loaded model. It owns the KV pages, and generated tokens until `pop_tokens` takes them.

    `decode` turns token ids into text; requests with stop strings need it. `seed` is the seed of requests without one.
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
        self._module = loaded.module
        self._pages = CpuKVCache(loaded.attention, num_pages=num_pages, page_size=page_size, kv_type=loaded.kv_type)
        self._generation = TokenBuffers(loaded.eos_token_ids, decode, seed)
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self._threads = min(torch.get_num_threads(), most)
        self._token_elements = loaded.config.hidden_size
        self._weight_elements = loaded.config.hidden_size**2
        self._key_elements = max(2 * spec.heads * spec.width for spec in loaded.attention.values())

    @property
    def memory(self) -> tuple[NDArray[Any], ...]:
        """The memory of pages."""
        return tuple(self._pages.memory.values())

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget what an interrupted job left in slots."""
        self._generation.begin(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self._generation.rebind(requests)

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and return which sequences have finished."""
        begun = time.perf_counter()
        generation = self._generation
        generation.make_room(step.slots)
        tokens = step.num_tokens
        packed = pack_tokens(step, generation, self._pages.page_size)
        ids = np.where(packed.ids < 0, generation.tokens.ravel()[-1 - np.minimum(packed.ids, -1)], packed.ids)
        pages, places = np.divmod(packed.places, np.int32(self._pages.page_size))
        attention = CpuAttention(
            self._pages,
            tables=step.block_tables,
            slots=step.slots,
            starts=step.starts,
            counts=step.counts,
            token_pages=pages,
            token_offsets=places,
        )
        keys = int(step.starts.sum()) + tokens
        elements = self._weight_elements + tokens * self._token_elements + keys * self._key_elements
        numba.set_num_threads(self._threads if elements >= _WORTH_THREADS else 1)
        last_rows = np.cumsum(step.counts, dtype=np.int64)[step.samples] - 1
        with torch.inference_mode():
            logits = self._module(
                input_ids=torch.from_numpy(ids.astype(np.int64))[None],
                position_ids=torch.from_numpy(packed.positions.astype(np.int64))[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(last_rows),
                llmbatch=attention,
            ).logits[0]
            result = self._sample(step, logits.float().contiguous().numpy())
        return replace(result, seconds=time.perf_counter() - begun)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        return self._generation.pop_tokens(slot)

    def _sample(self, step: Step, logits: NDArray[np.float32]) -> StepResult:
        generation = self._generation
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        tokens, finite = np.empty(len(slots), np.int32), np.empty(len(slots), np.bool_)
        sample(
            logits,
            generation.temperature[requests],
            generation.top_k[requests],
            generation.top_p[requests],
            generation.seeds[requests],
            generation.lengths[slots],
            tokens,
            finite,
        )
        return generation.append(step, tokens, finite)
