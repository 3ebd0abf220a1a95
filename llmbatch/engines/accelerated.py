"""The torch engine on a device: transformers models over pages, with no wait but for the tokens of a step.

A step is decided on the host from lengths alone, packed there, and uploaded in one copy. Tokens that were generated
stay on the device, where the next step finds them: the host refers to them by slot and place, and does not need to
know them. `submit` queues a step, `collect` waits for the oldest that is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from llmbatch.engines import Finish, Step, StepResult
from llmbatch.engines.device import DevicePages, DeviceStep, plan_layers, take_plans, upload
from llmbatch.engines.device_sampler import Draw, choose
from llmbatch.engines.generation import Generation
from llmbatch.engines.loading import LoadedModel
from llmbatch.kernels.backends import Layout, PagedAttention
from llmbatch.requests import Requests


@njit(cache=True)
def _pack(
    prompts: NDArray[np.int32],
    offsets: NDArray[np.int64],
    columns: int,
    slots: NDArray[np.int32],
    requests: NDArray[np.int32],
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    tables: NDArray[np.int32],
    page_size: int,
    ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    places: NDArray[np.int32],
) -> None:
    """Token, position and place in the pages of each packed token.

    A generated token is -1 - its place among those of all slots, of which each has `columns`.
    """
    t = 0
    for i in range(slots.size):
        begin = offsets[requests[i]]
        prompt_length = offsets[requests[i] + 1] - begin
        slot = slots[i]
        for position in range(starts[i], starts[i] + counts[i]):
            if position < prompt_length:
                ids[t] = prompts[begin + position]
            else:
                ids[t] = -1 - (slot * columns + position - prompt_length)
            positions[t] = position
            places[t] = tables[slot, position // page_size] * page_size + position % page_size
            t += 1


@dataclass(frozen=True, slots=True)
class _Queued:
    step: Step
    kept: NDArray[np.bool_]  # [samples] False where the sequence has ended or was withdrawn meanwhile
    tokens: torch.Tensor  # int32 [samples], on the host when `done`
    finite: torch.Tensor  # bool [samples], likewise
    done: torch.cuda.Event | None  # None: at once

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class AcceleratedEngine:
    """Runs steps of a loaded model on its device. It owns the KV pages, and the generated tokens until retired.

    `decode` turns token ids into text; it is needed by requests that have stop strings. `seed` is the seed of
    requests that have none of their own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: PagedAttention,
        *,
        num_pages: int,
        page_size: int,
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        seed: int = 0,
    ) -> None:
        self._module = loaded.module
        self._device = loaded.device
        self._attention = attention
        self._pages = DevicePages(
            loaded.attention, num_pages=num_pages, page_size=page_size, dtype=loaded.dtype, device=self._device
        )
        self._generation = Generation(loaded.eos_token_ids, decode, seed)
        self._generated = torch.zeros(self._generation.tokens.shape, dtype=torch.int32, device=self._device)
        self._queue: deque[_Queued] = deque()

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.nbytes

    def begin(self, requests: Requests) -> None:
        """Take the requests that the next steps are about; what an interrupted job left in slots is forgotten."""
        self._queue.clear()
        self._generation.begin(requests)

    def go_on(self, requests: Requests) -> None:
        """Take other requests, among which are those that are in slots."""
        self._generation.go_on(requests)

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and say which sequences have finished."""
        self.submit(step)
        return self.collect()

    @torch.inference_mode()
    def submit(self, step: Step) -> StepResult:
        """Queue a step on the device; which of its sequences will have all the tokens they may have."""
        self._make_room(step.slots)
        requests, size, tokens = self._generation.requests, self._pages.page_size, step.num_tokens
        ids, positions, places = np.empty((3, tokens), np.int32)
        _pack(
            requests.tokens, requests.offsets, self._generated.shape[1], step.slots, step.requests, step.starts,
            step.counts, step.block_tables, size, ids, positions, places,
        )  # fmt: skip
        sampled = step.slots[step.samples]
        last = (np.cumsum(step.counts)[step.samples] - 1).astype(np.int32)
        targets = sampled * np.int32(self._generated.shape[1]) + self._generation.queued[sampled]
        layout = Layout(step.block_tables, step.slots, step.starts, step.counts, step.num_decodes)
        plans = plan_layers(self._pages, self._attention, layout)
        arrays = [ids, positions, places, last, targets, *(array for plan in plans.values() for array in plan.arrays)]
        there = upload(arrays, self._device)
        known = self._generated.view(-1)
        given = torch.where(there[0] < 0, known[(-1 - there[0]).clamp(min=0)], there[0])
        logits = self._module(
            input_ids=given[None],
            position_ids=there[1][None],
            use_cache=False,
            logits_to_keep=there[3],
            llmbatch=DeviceStep(self._pages, self._attention, take_plans(plans, there[5:]), there[2]),
        ).logits[0]
        tokens_there, finite = choose(logits, self._draws(step))
        known[there[4]] = tokens_there
        self._queue.append(self._queued(step, tokens_there, finite))
        return self._generation.expect(step)

    def collect(self) -> StepResult:
        """Wait for the older queued step; its sampled tokens, and which of its sequences have finished."""
        queued = self._queue.popleft()
        queued.wait()
        step, generation = queued.step, self._generation
        result = generation.append(step, queued.tokens.numpy(), queued.finite.numpy(), queued.kept)
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        ended = result.finished > Finish.RUNNING
        early = ended & (generation.lengths[slots] < generation.requests.max_tokens[requests])
        if early.any():
            self.drop(slots[early], requests[early])
        return result

    def drop(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> None:
        """These sequences have ended before the queued steps: what is sampled for them is not kept."""
        self._generation.queued[slots] = 0
        for queued in self._queue:
            step = queued.step
            queued.kept[np.isin(step.requests[step.samples], requests)] = False

    def retire(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        return self._generation.retire(slot)

    def _make_room(self, slots: NDArray[np.int32]) -> None:
        self._generation.make_room(slots)
        rows, columns = self._generation.tokens.shape
        have, capacity = self._generated.shape
        if (rows, columns) != (have, capacity):
            grown = self._generated.new_zeros(rows, columns)
            grown[:have, :capacity] = self._generated
            self._generated = grown

    def _draws(self, step: Step) -> Draw | None:
        """How the samples are drawn that are; None where all of them are the likeliest tokens."""
        generation = self._generation
        requests = step.requests[step.samples]
        if not generation.temperature[requests].any():
            return None
        return Draw.of(
            generation.temperature[requests], generation.top_k[requests], generation.top_p[requests],
            generation.seeds[requests], generation.queued[step.slots[step.samples]],
        )  # fmt: skip

    def _queued(self, step: Step, tokens: torch.Tensor, finite: torch.Tensor) -> _Queued:
        kept = np.ones(len(tokens), np.bool_)
        if self._device.type != "cuda":
            return _Queued(step, kept, tokens, finite, None)
        here = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (tokens, finite)]
        for target, source in zip(here, (tokens, finite), strict=True):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _Queued(step, kept, here[0], here[1], done)
