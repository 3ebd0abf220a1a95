"""The engine of the processor: transformers models over pages.

All sequences of a step are packed into one row of tokens. The model runs once over the row; its attention modules write
the row's keys and values into pages and attend through the step's block tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache
from llmbatch.engine.cpu.step_tokens import step_tokens
from llmbatch.engine.cpu.threads import threads_at_once
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.grammars import Grammars
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.prompt_scores import Head, scored_rows
from llmbatch.engine.sampling.choice import choose_tokens, on_host, tell_of_prompts
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import Step, StepResult
from llmbatch.system.borrowed_threads import threads_borrowed

_WORTH_THREADS = 1 << 16  # elements a layer touches; below, waking threads costs more than they save


class CpuEngine:
    """Runs steps of a loaded model. It owns the KV pages, and generated tokens until `pop_tokens` takes them.

    `decode` turns token ids into text; requests with stop strings need it. `seed` is the seed of requests without one.
    Requests whose answers have a form need `grammars`. `model` is called in place of the loaded module, which is then
    on another device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        window_pages: int = 0,
        page_size: int,
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        seed: int = 0,
        grammars: Grammars | None = None,
        model: Callable[..., Any] | None = None,
    ) -> None:
        self._model = model or loaded.module
        # A step of others would bring other layers' weights to where a held step has its own.
        self._holds = model is None or loaded.streamed is None
        self._head = Head(loaded.module)
        self._pages = CpuKVCache(
            loaded.attention,
            num_pages=num_pages,
            window_pages=window_pages,
            page_size=page_size,
            kv_type=loaded.kv_type,
        )
        self._generation = TokenBuffers(loaded.eos_token_ids, decode, seed, grammars)
        self._own = self._threads = threads_at_once()
        self._borrowed = 0  # of these threads
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

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since."""
        self._generation.extend(requests, rows)

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and return which sequences have finished."""
        return self._execute(step, None)

    def execute_in_parts(self, step: Step, between: Callable[[], None]) -> StepResult:
        """Execute a step, calling `between` between two layers; it may execute others.

        Where layers come to a device from its host, it is not called.
        """
        elsewhere = 0.0

        def others() -> None:
            nonlocal elsewhere
            begun, threads = time.perf_counter(), numba.get_num_threads()
            between()
            numba.set_num_threads(threads)
            elsewhere += time.perf_counter() - begun

        result = self._execute(step, others)
        assert result.seconds is not None
        return replace(result, seconds=result.seconds - elsewhere)

    def _execute(self, step: Step, between: Callable[[], None] | None) -> StepResult:
        begun = time.perf_counter()
        generation = self._generation
        generation.make_room(step.slots)
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        generation.recall(slots, requests)
        masks = None if generation.grammars is None else generation.grammars.masks(slots, requests)
        tokens = step_tokens(step, generation, self._pages.page_size)
        scored = scored_rows(step, generation.requests, generation.columns.tells_of_prompt)
        attention = CpuAttention(
            self._pages,
            tables=step.block_tables,
            slots=step.slots,
            starts=step.starts,
            counts=step.counts,
            token_pages=tokens.pages,
            token_offsets=tokens.offsets,
            window_tables=step.window_tables,
            between=between
            if self._holds and not scored
            else None,  # the head of a model that keeps states is not for other steps
        )
        elements = self._weight_elements + len(tokens.ids) * self._token_elements + tokens.keys * self._key_elements
        numba.set_num_threads(self._threads_now() if elements >= _WORTH_THREADS else 1)
        rows = tokens.samples
        if scored:
            rows = np.concatenate([rows, *(one.first + np.arange(len(one.tokens)) for one in scored)])
        states: list[torch.Tensor] = []
        with torch.inference_mode(), self._head.keeps_states(len(slots), states) if scored else nullcontext():
            logits = self._model(
                input_ids=torch.from_numpy(tokens.ids)[None],
                position_ids=torch.from_numpy(tokens.positions)[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(rows),
                llmbatch=attention,
            ).logits[0]
            if len(step.copies):
                self._pages.copy(step.copies)
            chosen = choose_tokens(
                on_host(logits), slots, requests, None if masks is None else masks.result(), generation
            )
            result = generation.append(step, chosen)
        if scored:
            with torch.inference_mode():
                tell_of_prompts(self._head, states[0], scored, generation)
        return replace(result, seconds=time.perf_counter() - begun)

    def _threads_now(self) -> int:
        """Return how many threads compute a step: with those that others lend, from the step after they did."""
        borrowed = threads_borrowed()
        if borrowed != self._borrowed:
            self._borrowed, self._threads = borrowed, threads_at_once(self._own + borrowed)
        return self._threads

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens of the answer in a slot so far, as far as they are known."""
        return self._generation.generated(slot)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        return self._generation.pop_tokens(slot)

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Return what is told of a request's answer and of its prompt, before `pop_tokens`; None where nothing is."""
        return self._generation.logprobs(slot, request)
