"""Attention of a step on a device: its pages, what is uploaded for the step, and the layers' calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from llmbatch.engines.pieces import attend_unpacked
from llmbatch.kernels import triton_fused
from llmbatch.kernels.backends import Layout, PagedAttention, Plan
from llmbatch.kernels.spec import AttentionSpec
from llmbatch.kernels.triton_backend import TritonAttention

PAGE_SIZE: Final = 16


class DevicePages:
    """The KV memory of all layers: `num_pages` pages of `page_size` tokens, a power of two.

    Keys and values of a layer are [pages, heads, page size, width] each.
    """

    def __init__(
        self,
        specs: dict[int, AttentionSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.specs = specs
        self.page_size = page_size
        shapes = {layer: (num_pages, spec.heads, page_size, spec.width) for layer, spec in specs.items()}
        self.keys = {layer: torch.empty(shape, dtype=dtype, device=device) for layer, shape in shapes.items()}
        self.values = {layer: torch.empty(shape, dtype=dtype, device=device) for layer, shape in shapes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in (*self.keys.values(), *self.values.values()))


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in one copy that the host does not wait for. Each begins at a multiple of 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    target = staged.numpy()
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        target[at : at + array.size] = array.reshape(-1)
        at += size
    there = staged.to(device, non_blocking=True)
    parts = torch.split(there, sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class DeviceStep:
    """Attention of a step (`llmbatch.engines.pieces.StepAttention`).

    `plans` are those of the distinct layers (`AttentionSpec.kind`), on the device like `places` int32 [tokens], where
    each token's keys and values go: page times page size plus its place in the page.
    """

    def __init__(
        self,
        pages: DevicePages,
        backend: PagedAttention,
        plans: dict[tuple[int, int, int], tuple[Plan, list[torch.Tensor]]],
        places: torch.Tensor,
    ) -> None:
        self._pages, self._backend, self._plans, self._places = pages, backend, plans, places

    @classmethod
    def of(
        cls,
        pages: DevicePages,
        backend: PagedAttention,
        layout: Layout,
        places: NDArray[np.int32],
        device: torch.device,
    ) -> DeviceStep:
        """A step that is uploaded by itself."""
        plans = plan_layers(pages, backend, layout)
        arrays = [places, *(array for plan in plans.values() for array in plan.arrays)]
        there = upload(arrays, device)
        return cls(pages, backend, take_plans(plans, there[1:]), there[0])

    def run(
        self,
        spec: AttentionSpec,
        packed: torch.Tensor,
        *,
        cosine: torch.Tensor | None = None,
        sine: torch.Tensor | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """Attention output of a layer."""
        keys, values = self._pages.keys[spec.layer], self._pages.values[spec.layer]
        query = packed.new_empty(len(packed), spec.query_heads * spec.width)
        triton_fused.rotate_and_store(
            packed, query, cosine, sine, query_norm, key_norm, epsilon, self._places, keys, values
        )
        plan, tensors = self._plans[spec.kind]
        return self._backend.attend(spec, query, keys, values, plan, tensors)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of a module that projects and rotates by itself: [1, heads, tokens, width] each."""
        return attend_unpacked(self, self._pages.specs[module.layer_idx], query, key, value)


def plan_layers(pages: DevicePages, backend: PagedAttention, layout: Layout) -> dict[tuple[int, int, int], Plan]:
    """A step's plan for each kind of layer."""
    kinds = {spec.kind: spec for spec in pages.specs.values()}
    return {kind: backend.plan(layout, spec, pages.page_size) for kind, spec in kinds.items()}


def take_plans(
    plans: dict[tuple[int, int, int], Plan], tensors: Sequence[torch.Tensor]
) -> dict[tuple[int, int, int], tuple[Plan, list[torch.Tensor]]]:
    """The plans with their arrays as they were uploaded, one plan's after the other's."""
    taken, at = {}, 0
    for kind, plan in plans.items():
        taken[kind] = plan, list(tensors[at : at + len(plan.arrays)])
        at += len(plan.arrays)
    return taken


class DevicePieces:
    """Kernels for a device (`llmbatch.engines.pieces.Pieces`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
        """RMSNorm."""
        triton_fused.normalize(x, weight, epsilon, out)

    def gate(self, x: torch.Tensor, activation: int, out: torch.Tensor) -> None:
        """A gated activation."""
        triton_fused.gate(x, activation, out)

    def probe_step(self, specs: dict[int, AttentionSpec], dtype: torch.dtype, tokens: int) -> DeviceStep:
        """A step of one sequence."""
        zero = np.zeros(1, np.int32)
        pages = DevicePages(specs, num_pages=1, page_size=PAGE_SIZE, dtype=dtype, device=self._device)
        layout = Layout(tables=zero[None], slots=zero, starts=zero, counts=zero + tokens, decodes=0)
        backend = TritonAttention(self._device)
        return DeviceStep.of(pages, backend, layout, np.arange(tokens, dtype=np.int32), self._device)
