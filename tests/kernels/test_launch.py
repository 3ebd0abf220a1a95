"""A launch of known constants finds the kernel that Triton would, and what it does not know goes to Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler import CompiledKernel

from llmbatch.kernels.triton.launch import BoundKernel

GRID = (2, 1, 1)
FLOATS = torch.zeros(32)


class Compiled(CompiledKernel):  # type: ignore[misc]
    """Notes what it is launched with."""

    module = None  # nothing to unload

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given: self.log.append((grid, *given))


class Kernel:
    """What `triton.jit` makes, as far as it is used; counts its own launches."""

    arg_names = ("x", "width", "scale", "BLOCK", "FAST")

    def __init__(self) -> None:
        self.launches = 0
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled | None]:
        def launch(*given: Any, **bound: Any) -> Compiled | None:
            self.launches += 1
            return self.made()

        return launch

    def made(self) -> Compiled | None:
        return Compiled(self.direct)


class Interpreted(Kernel):
    """Compiles nothing."""

    def made(self) -> None:
        return None


def bound(kernel: Kernel) -> BoundKernel:
    return BoundKernel(kernel, FAST=True, num_warps=4, BLOCK=64)


def test_a_second_launch_is_direct_with_constants_in_the_kernels_order() -> None:
    kernel = Kernel()
    once = bound(kernel)
    once.launch(GRID, (FLOATS,), 48, 0.5)
    once.launch(GRID, (FLOATS,), 160, 0.25)  # a multiple of 16 as well
    assert kernel.launches == 1
    assert kernel.direct == [(GRID, FLOATS, 160, 0.25, 64, True)]


@pytest.mark.parametrize(
    ("tensor", "width"),
    [
        (FLOATS.to(torch.bfloat16), 48),
        (FLOATS, 47),
        (FLOATS, 1),
        (FLOATS, 1 << 31),
        (FLOATS, -(1 << 31) - 16),
    ],
)
def test_what_triton_compiles_another_kernel_for_goes_to_triton(tensor: torch.Tensor, width: int) -> None:
    kernel = Kernel()
    once = bound(kernel)
    once.launch(GRID, (FLOATS,), 48, 0.5)
    once.launch(GRID, (tensor,), width, 0.5)
    assert (kernel.launches, kernel.direct) == (2, [])


def test_an_address_that_is_no_multiple_of_sixteen_always_goes_to_triton() -> None:
    kernel = Kernel()
    once = bound(kernel)
    for tensor in (FLOATS, FLOATS[1:], FLOATS[1:]):
        once.launch(GRID, (tensor,), 48, 0.5)
    assert (kernel.launches, kernel.direct) == (3, [])


def test_the_interpreter_is_asked_each_time() -> None:
    kernel = Interpreted()
    once = bound(kernel)
    for _ in range(3):
        once.launch(GRID, (FLOATS,), 48, 0.5)
    assert kernel.launches == 3
