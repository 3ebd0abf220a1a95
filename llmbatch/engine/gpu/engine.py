"""The engine of a GPU: transformers models over pages; the host waits only for the tokens of a step.

A step is decided on the host from lengths alone, packed there, and uploaded in one copy (`llmbatch.engine.gpu.batch`).
The `Execution` decides how its forwards are run; small steps are recorded and replayed
(`llmbatch.engine.gpu.graphs.recorder`). `submit` queues a step, `collect` waits for the oldest queued one.

Steps with rows that ask for more of their logits than a token are not queued: penalties, forms and log-probabilities
need the tokens before, and are computed on the host, by the code of the processor. Such a step is computed when it is
collected, and the device waits meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.generation.buffers import TokenBuffers, TokenChoices
from llmbatch.engine.gpu.attention import GpuKVCache
from llmbatch.engine.gpu.deferred import DeferredStep, DeferredSteps
from llmbatch.engine.gpu.execution import Execution, Sequential
from llmbatch.engine.gpu.followers import Followers, NoFollowers
from llmbatch.engine.gpu.graphs.recorder import Recorder
from llmbatch.engine.gpu.microbatch import MicroBatch, order_of
from llmbatch.engine.gpu.sampler import Draw, choose
from llmbatch.engine.gpu.step_forward import StepForward
from llmbatch.engine.grammars import Grammars
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.kernels.interface import PagedAttention
from llmbatch.perf_model.work import Rates
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.scheduler.output import FinishReason, Step, StepResult


@dataclass(frozen=True, slots=True)
class _Queued:
    step: Step
    order: NDArray[np.intp]  # [samples] where each of the step's samples stands among those of its parts
    kept: NDArray[np.bool_]  # [samples] False where the sequence has ended or was withdrawn meanwhile
    tokens: torch.Tensor  # int32 [samples], on the host when `done`, part by part
    finite: torch.Tensor  # bool [samples], likewise
    begun: torch.cuda.Event | None
    done: torch.cuda.Event | None  # None: at once

    def wait(self) -> float | None:
        """Wait until it is computed; returns the seconds that the device took."""
        if self.begun is None or self.done is None:
            return None
        self.done.synchronize()
        return float(self.begun.elapsed_time(self.done)) / 1e3


class GpuEngine:
    """Runs steps of a loaded model on its device.

    It owns the KV pages, and the generated tokens of each slot until `pop_tokens` takes them.

    `execution` runs its forwards, one after the other if none is given. With a `recorder` small steps can be recorded
    (`record`), if the attention can be (`GraphCapturable`). `decode` turns token ids into text; requests with stop
    strings need it. `seed` is the seed of requests without one. Requests whose answers have a form need `grammars`.
    `followers` are told of each forward, where the model is split over devices.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: PagedAttention,
        *,
        num_pages: int,
        window_pages: int = 0,
        page_size: int,
        execution: Execution | None = None,
        recorder: Recorder | None = None,
        decode: Callable[[NDArray[np.int32]], str] | None = None,
        seed: int = 0,
        grammars: Grammars | None = None,
        followers: Followers | None = None,
    ) -> None:
        self._loaded = loaded
        self._generation = TokenBuffers(loaded.eos_token_ids, decode, seed, grammars)
        self._forward = StepForward(
            loaded,
            attention,
            self._generation,
            num_pages=num_pages,
            window_pages=window_pages,
            page_size=page_size,
            execution=execution or Sequential(),
            recorder=recorder,
            followers=followers or NoFollowers(),
        )
        self._deferred = DeferredSteps(self._forward, self._generation)
        self._queue: deque[_Queued | DeferredStep] = deque()

    @torch.inference_mode()
    def record(self, decodes: Iterable[int], mixed: Iterable[int] = (), rates: Rates | None = None) -> None:
        """Record steps of so many decodes each, and steps with chunks of so many tokens (`mixed_sizes`), before a job.

        It stops the device. Raises RuntimeError if that fails. What was not recorded is launched kernel by kernel; so
        are steps with chunks that at these `rates` take the device longer than the host takes to launch them.
        """
        self._forward.record(decodes, mixed, rates)

    @property
    def pages(self) -> GpuKVCache:
        """The KV pages."""
        return self._forward.pages

    @property
    def graph_bytes(self) -> int:
        """Bytes of what recorded steps read and write, in addition to what a recording takes."""
        return self._forward.graph_bytes

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary."""
        return int(self._loaded.config.vocab_size)

    def begin(self, requests: RequestBatch) -> None:
        """Take the requests of the next steps; forget what an interrupted job left in slots."""
        self._queue.clear()
        self._generation.begin(requests)

    def rebind(self, requests: RequestBatch) -> None:
        """Replace the requests; the new ones include those that are in slots."""
        self._generation.rebind(requests)

    def extend(self, requests: RequestBatch, rows: NDArray[np.int32]) -> None:
        """Take note of requests that were written into spare `rows` of the batch since."""
        self._generation.extend(requests, rows)

    def execute(self, step: Step) -> StepResult:
        """Compute the step, keep the sampled tokens, and return which sequences have finished."""
        self.submit(step)
        return self.collect()

    @torch.inference_mode()
    def submit(self, step: Step) -> StepResult | None:
        """Queue a step on the device; returns which sequences will then have all the tokens they may have.

        Returns None for a step that is computed when it is collected.
        """
        deferred = DeferredStep.find(step, self._generation)
        if deferred is not None:
            self._queue.append(deferred)
            return None
        begun = self._mark()
        self._forward.enqueue(step)
        parts = self._forward.cut(step)
        chosen = []
        for part, targets, logits in self._forward.run(parts):
            tokens, finite = choose(logits, self._draws(part))
            self._forward.tokens[targets] = tokens
            chosen.append((tokens, finite))
        if len(step.copies):
            self.pages.copy(step.copies)
        sampled = (torch.cat(column) for column in zip(*chosen, strict=True))
        self._queue.append(self._queued(step, parts, begun, *sampled))
        return self._generation.expect(step)

    def collect(self) -> StepResult:
        """Wait for the older queued step; returns its sampled tokens, and which sequences have finished."""
        queued = self._queue.popleft()
        if isinstance(queued, DeferredStep):
            return self._deferred.compute(queued)
        seconds = queued.wait()
        step, generation = queued.step, self._generation
        tokens, finite = (column.numpy()[queued.order] for column in (queued.tokens, queued.finite))
        slots, requests = step.slots[step.samples], step.requests[step.samples]
        generation.recall(slots[queued.kept], requests[queued.kept])
        result = generation.append(step, TokenChoices(tokens, finite), queued.kept)
        ended = result.finished > FinishReason.RUNNING
        early = ended & (generation.lengths[slots] < generation.most[requests])
        if early.any():
            self.drop(slots[early], requests[early])
        return replace(result, seconds=seconds)

    def drop(self, slots: NDArray[np.int32], requests: NDArray[np.int32]) -> None:
        """Discard what queued steps sample for these sequences, which have ended before."""
        self._generation.queued[slots] = 0
        for queued in self._queue:
            step = queued.step
            queued.kept[np.isin(step.requests[step.samples], requests)] = False

    def logprobs(self, slot: int, request: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """Return what is told of a request's answer and of its prompt, before `pop_tokens`; None where nothing is."""
        return self._generation.logprobs(slot, request)

    def generated(self, slot: int) -> NDArray[np.int32]:
        """Return the tokens of the answer in a slot so far, as far as they are known."""
        return self._generation.generated(slot)

    def pop_tokens(self, slot: int) -> NDArray[np.int32]:
        """Hand over the tokens generated in a slot and free it for another request."""
        return self._generation.pop_tokens(slot)

    def _draws(self, step: Step) -> Draw | None:
        """Return the sampling parameters of the non-greedy rows, or None if every row is greedy."""
        generation = self._generation
        requests = step.requests[step.samples]
        columns = generation.columns
        if not columns.temperature[requests].any():
            return None
        return Draw.of(
            columns.temperature[requests],
            columns.top_k[requests],
            columns.top_p[requests],
            columns.seeds[requests],
            generation.queued[step.slots[step.samples]],
        )

    def _mark(self) -> torch.cuda.Event | None:
        """Record an event at the device's place in its work, or return None if there is no queue."""
        if self._forward.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _queued(
        self,
        step: Step,
        parts: tuple[MicroBatch, ...],
        begun: torch.cuda.Event | None,
        tokens: torch.Tensor,
        finite: torch.Tensor,
    ) -> _Queued:
        order, kept = order_of(parts), np.ones(len(tokens), np.bool_)
        if self._forward.device.type != "cuda":
            return _Queued(step, order, kept, tokens, finite, None, None)
        here = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (tokens, finite)]
        for target, source in zip(here, (tokens, finite), strict=True):
            target.copy_(source, non_blocking=True)
        return _Queued(step, order, kept, here[0], here[1], begun, self._mark())
