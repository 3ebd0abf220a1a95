"""The forwards of a step: packed, uploaded in one copy, or recorded before and replayed.

Generated tokens stay on the device (`tokens`), where the next step reads them, whether the host knows them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.attention import GpuKVCache, plan_layers
from llmbatch.engine.gpu.batch import HostBatch, upload
from llmbatch.engine.gpu.execution import Execution
from llmbatch.engine.gpu.followers import FollowedBatch, Followers
from llmbatch.engine.gpu.graphs.recorder import Recorder, look_up
from llmbatch.engine.gpu.graphs.steps import StepGraphs
from llmbatch.engine.gpu.microbatch import MicroBatch, order_of
from llmbatch.engine.gpu.model_runner import ModelRunner
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.prompt_scores import Head, ScoredRows
from llmbatch.kernels.interface import BatchLayout, GraphCapturable, PagedAttention
from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.output import Step


class StepForward:
    """Runs a loaded model over the tokens of steps. It owns the KV pages, and the device's copy of generated tokens.

    `generation` are the tokens as the host knows them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: PagedAttention,
        generation: TokenBuffers,
        *,
        num_pages: int,
        window_pages: int,
        page_size: int,
        execution: Execution,
        recorder: Recorder | None,
        followers: Followers,
    ) -> None:
        self._attention = attention
        self._execution = execution
        self._followers = followers
        self._generation = generation
        self.device: torch.device = loaded.device
        self._head = Head(loaded.module)
        fixed = attention if recorder is not None and isinstance(attention, GraphCapturable) else None
        spare = fixed is not None
        self.pages: GpuKVCache = GpuKVCache(
            loaded.attention,
            num_pages=num_pages + spare,
            window_pages=window_pages and window_pages + spare,
            page_size=page_size,
            dtype=getattr(torch, loaded.kv_type.name),
            device=self.device,
        )
        runner = partial(ModelRunner, loaded.module, self.pages, execution=execution)
        self._forward = runner(attention)
        self._graphs: StepGraphs | None = None
        if recorder is not None and fixed is not None:
            self._graphs = StepGraphs(
                runner,
                fixed,
                self.pages,
                recorder,
                vocabulary=loaded.config.vocab_size,
                dtype=loaded.dtype,
                device=self.device,
            )
        self._tokens = torch.zeros(generation.tokens.shape, dtype=torch.int32, device=self.device)

    def record(self, decodes: Iterable[int], mixed: Iterable[int], rates: Rates | None) -> None:
        """Record steps, as `StepGraphs.record` does."""
        if self._graphs is not None:
            decodes, mixed = tuple(decodes), tuple(mixed)
            self._followers.record(decodes, mixed, rates)
            self._graphs.record(decodes, mixed, rates)

    @property
    def graph_bytes(self) -> int:
        """Bytes of what recorded steps read and write."""
        return 0 if self._graphs is None else self._graphs.nbytes

    @property
    def tokens(self) -> torch.Tensor:
        """The generated tokens on the device, int32, flat: in the places of `TokenBuffers.tokens`."""
        return self._tokens.view(-1)

    def enqueue(self, step: Step) -> None:
        """Make room for the tokens of a step, here and on the device (`TokenBuffers.enqueue`)."""
        self._generation.enqueue(step)
        self.grow()

    def grow(self) -> None:
        """Make the device's tokens as many as the host's."""
        rows, columns = self._generation.tokens.shape
        have, capacity = self._tokens.shape
        if (rows, columns) != (have, capacity):
            grown = self._tokens.new_zeros(rows, columns)
            grown[:have, :capacity] = self._tokens
            self._tokens = grown

    def cut(self, step: Step) -> tuple[MicroBatch, ...]:
        """Cut a step into the parts that are computed at the same time."""
        return self._execution.cut(step)

    def run(self, parts: tuple[MicroBatch, ...]) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
        """Run each part of a step; returns the places of its sampled tokens, and its logits."""
        found = self._graphs.find(parts[0].step, self._generation) if self._graphs and len(parts) == 1 else None
        if self._graphs is not None and found is not None:
            one, recording = found
            recording.fill(one, self.tokens)
            self._followers.run(FollowedBatch(one, parts[0].step.copies, recorded=True), recording.batch.ids)
            batch, logits = self._graphs.repeat(one, recording)
            yield parts[0].step, batch.targets[: len(logits)], logits
            return
        steps = [part.step for part in parts]
        packed = [self._packed(step) for step in steps]
        batches = upload(packed, self.device)
        batches = [batch._replace(ids=look_up(batch.ids, self.tokens)) for batch in batches]
        for one, batch, step in zip(packed, batches, steps, strict=True):
            self._followers.run(FollowedBatch(one, step.copies), batch.ids)
        results = self._execution.run([partial(self._forward, batch) for batch in batches])
        yield from zip(steps, (batch.targets for batch in batches), results, strict=True)

    def logits(self, step: Step) -> torch.Tensor:
        """Run a step; returns the logits of its samples."""
        parts = self.cut(step)
        found = torch.cat([logits for _, _, logits in self.run(parts)])
        return found[torch.from_numpy(order_of(parts)).to(found.device)]

    def logits_and_states(self, step: Step, scored: list[ScoredRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step, whole; returns the logits of its samples, and the states of `scored` rows before the head."""
        rows = np.concatenate([one.first + np.arange(len(one.tokens), dtype=np.int32) for one in scored])
        packed = self._packed(step).wanting(rows.astype(np.int32))
        (batch,) = upload([packed], self.device)
        batch = batch._replace(ids=look_up(batch.ids, self.tokens))
        self._followers.run(FollowedBatch(packed, step.copies, scored=True), batch.ids)
        states: list[torch.Tensor] = []
        with self._head.keeps_states(packed.rows, states):
            (logits,) = self._execution.run([partial(self._forward, batch)])
        return logits, states[0]

    def head_for(self, states: torch.Tensor) -> Head:
        """Return the head of the model, for all logits of these states."""
        self._followers.score(states)
        return self._head

    @torch.inference_mode()
    def follow(self, given: FollowedBatch, receive: Callable[[torch.Tensor], None]) -> None:
        """Run a batch that another rank has packed; `receive` writes its tokens."""
        packed = given.packed
        if given.recorded and self._graphs is not None:
            recording = self._graphs.recording_of(packed)
            recording.fill(packed, torch.zeros(1, dtype=torch.int32, device=self.device))
            receive(recording.batch.ids)
            self._graphs.repeat(packed, recording)
        else:
            (batch,) = upload([packed], self.device)
            receive(batch.ids)
            with self._head.keeps_states(packed.rows, []) if given.scored else nullcontext():
                self._forward(batch)
        if len(given.copies):
            self.pages.copy(given.copies)

    def _packed(self, step: Step) -> HostBatch:
        layout = BatchLayout(step.block_tables, step.slots, step.starts, step.counts, step.num_decodes)
        size = self.pages.page_size
        plans = plan_layers(
            self.pages, layout, step.window_tables, lambda given, spec: self._attention.plan(given, spec, size)
        )
        return HostBatch.of(step, self._generation, size, plans)
