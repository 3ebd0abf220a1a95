"""The measured ceilings of a device: the rate of a large matrix product, and of a copy within its memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from llmbatch.kernels.triton.fp8 import scaled_product
from llmbatch.perf_model.hardware import Hardware, link_of

_SIZE: Final = 8192  # of the matrices: 1.1 TFLOP a product
_BYTES: Final = 1 << 30  # copied
_RUNS: Final = 10


@cache
def measure_device(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Measure a CUDA device, in about a second and once a process; `dtype` is that of the layers' products.

    The efficiencies are those of good kernels under these ceilings, not measured. Nor is the link to other devices,
    since that would take memory of them: it is its maker's figure.
    """
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return Hardware(
        name=name,
        compute=product_rate(device, dtype),
        bandwidth=copy_bandwidth(device),
        memory=float(torch.cuda.get_device_properties(device).total_memory),
        link=link_of(name),
    )


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product of random numbers: constants draw less power, and run faster."""
    a, b = (torch.randn(_SIZE, _SIZE, device=device).to(dtype) for _ in range(2))
    if dtype.itemsize == 1:
        ones = torch.ones(_SIZE, 1, device=device)
        return 2.0 * _SIZE**3 / median_seconds(device, lambda: scaled_product(a, b.T, ones, ones.T, torch.bfloat16))
    out = torch.empty_like(a)
    return 2.0 * _SIZE**3 / median_seconds(device, lambda: torch.mm(a, b, out=out))


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes/s of a copy, read and written."""
    source = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * _BYTES / median_seconds(device, lambda: target.copy_(source))


def median_seconds(device: torch.device, work: Callable[[], object], *, runs: int = _RUNS) -> float:
    """Time work on the device: the median of runs between events, after three that warm up."""
    for _ in range(3):
        work()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]  # type: ignore[no-untyped-call]
    for begin, end in pairs:
        begin.record(torch.cuda.current_stream(device))
        work()
        end.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    times: list[float] = sorted(begin.elapsed_time(end) for begin, end in pairs)
    return times[len(times) // 2] / 1e3
