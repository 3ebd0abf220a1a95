"""The inputs of a forward, packed on the host and uploaded in one copy.

Generated tokens stay on the device: the host refers to them by slot and place, and does not need to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.packing import pack_tokens, window_places
from llmbatch.kernels.interface import AttentionPlan
from llmbatch.scheduler.output import Step

Kind = tuple[int, int, int]  # of layers, see `AttentionSpec.kind`


class DeviceBatch(NamedTuple):
    """The inputs of a forward, int32 on the device; `plans` are those of the distinct kinds of layers."""

    ids: torch.Tensor  # [tokens] as in `PackedTokens`, like the next two
    positions: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor  # [samples] the token whose logits are wanted
    targets: torch.Tensor  # [samples] the place that the sampled token gets
    window_places: torch.Tensor  # [tokens] `places` where there are no window pages
    plans: dict[Kind, tuple[AttentionPlan, list[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A `DeviceBatch` on the host. The first `rows` samples are real, the rest is padding."""

    columns: tuple[NDArray[np.int32], ...]  # the first six of a `DeviceBatch`, or five where there are no window pages
    plans: dict[Kind, AttentionPlan]
    rows: int

    @classmethod
    def of(cls, step: Step, generation: TokenBuffers, page_size: int, plans: dict[Kind, AttentionPlan]) -> HostBatch:
        """Pack a step, given the counts of generated tokens."""
        tokens = pack_tokens(step, generation, page_size)
        sampled = step.slots[step.samples]
        last = (np.cumsum(step.counts)[step.samples] - 1).astype(np.int32)
        targets = sampled * np.int32(generation.tokens.shape[1]) + generation.queued[sampled]
        in_windows = window_places(step, tokens.positions, page_size)
        more = () if in_windows is None else (in_windows,)
        return cls((*tokens, last, targets, *more), plans, len(sampled))

    def padded(self, tokens: int, rows: int, place: int, window_place: int) -> HostBatch:
        """Pad to so many tokens, and so many sampled rows.

        Tokens of padding are token 0 at position 0, and write their keys and values to `place` and `window_place`. Rows
        of padding are the first token's.
        """
        ids, positions, places, last, targets, *in_windows = self.columns
        columns = (
            lengthened(ids, tokens),
            lengthened(positions, tokens),
            lengthened(places, tokens, place),
            lengthened(last, rows),
            lengthened(targets, rows),
            *(lengthened(column, tokens, window_place) for column in in_windows),
        )
        return HostBatch(columns, self.plans, self.rows)

    def wanting(self, rows: NDArray[np.int32]) -> HostBatch:
        """Want more of the last states: those of these tokens too, behind the samples'."""
        ids, positions, places, last, *others = self.columns
        return replace(self, columns=(ids, positions, places, np.concatenate((last, rows)), *others))

    def without_references(self) -> HostBatch:
        """Put token 0 where ids refer to generated tokens."""
        ids, *others = self.columns
        return replace(self, columns=(np.maximum(ids, 0), *others))

    @property
    def arrays(self) -> list[NDArray[np.int32]]:
        """All arrays that are uploaded."""
        return [*self.columns, *(array for plan in self.plans.values() for array in plan.uploaded)]

    def take(self, tensors: Sequence[torch.Tensor]) -> DeviceBatch:
        """Build the device's batch from the uploaded arrays."""
        plans, at = {}, len(self.columns)
        for kind, plan in self.plans.items():
            plans[kind] = plan, list(tensors[at : at + len(plan.uploaded)])
            at += len(plan.uploaded)
        return batch_of(tensors[: len(self.columns)], plans)


def batch_of(
    columns: Sequence[torch.Tensor], plans: dict[Kind, tuple[AttentionPlan, list[torch.Tensor]]]
) -> DeviceBatch:
    """Build a batch from the columns that were uploaded."""
    ids, positions, places, last, targets, *in_windows = columns
    return DeviceBatch(ids, positions, places, last, targets, in_windows[0] if in_windows else places, plans)


def lengthened(array: NDArray[np.int32], length: int, filler: int = 0) -> NDArray[np.int32]:
    """Append a filler up to a length: a tenth of what `numpy.pad` takes."""
    out = np.full(length, filler, np.int32)
    out[: len(array)] = array
    return out


def stage(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> torch.Tensor:
    """Copy the arrays one behind the other into pinned memory, each at a multiple of 16 bytes."""
    sizes = [_size(array) for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    target, at = staged.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        target[at : at + array.size] = array.reshape(-1)
        at += size
    return staged


def split(there: torch.Tensor, arrays: Sequence[NDArray[np.int32]]) -> list[torch.Tensor]:
    """Split a staged buffer into its arrays."""
    parts = torch.split(there, [_size(array) for array in arrays])
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def upload(packed: Sequence[HostBatch], device: torch.device) -> list[DeviceBatch]:
    """Upload the batches to the device, in one copy that the host does not wait for."""
    arrays = [array for one in packed for array in one.arrays]
    tensors = split(stage(arrays, device).to(device, non_blocking=True), arrays)
    batches, at = [], 0
    for one in packed:
        count = len(one.arrays)
        batches.append(one.take(tensors[at : at + count]))
        at += count
    return batches


def _size(array: NDArray[np.int32]) -> int:
    return -(-array.size // 4) * 4
