"""Compute, bandwidth and memory of a device, and the fraction of each that is reached in practice."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from llmbatch.arguments import refusal
from llmbatch.errors import ParameterError
from llmbatch.system.measurements import remembered

RESERVED: Final = 4e9  # bytes of a card that are neither weights nor KV
_ABOVE: Final = 64.0  # times numpy's rate, that ours may be: numpy's may be measured beside other work
_WEIGHT_OVERLAP: Final = 3.0  # how products overlap with reading their weights, before steps tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device (or a group that acts as one), with the fraction of its peaks that real kernels reach.

    The default efficiencies are those of well-tuned kernels on large batches: 0.75 of peak compute, 0.85 of peak
    bandwidth. Attention over prompts is assumed to reach the rate of products, unless measured
    (`llmbatch.perf_model.fit`), and weights are taken to be read as fast as KV. Raises `ParameterError` if a figure is
    not positive or an efficiency exceeds 1.
    """

    name: str
    compute: float  # FLOP/s, dense, in the type of the weights
    bandwidth: float  # bytes/s
    memory: float  # bytes
    compute_efficiency: float = 0.75
    bandwidth_efficiency: float = 0.85
    attention_efficiency: float | None = None  # of `compute`, for attention over prompts; None: as products
    weight_efficiency: float | None = None  # of `bandwidth`, for reading weights; None: as KV
    weight_overlap: float = 1.0  # exponent of products beside the reading of their own weights; law `bytes`
    expert_tile: int = 64  # rows that products of an expert take at a time, whole or not; 1: no tile has empty ones
    step_tokens: int = 0  # the most that a step has memory for beside weights and KV; 0: as many as are wanted
    step_seconds: float = 0.0  # that every step takes in addition to its work: launches, the host
    token_seconds: float = 0.0  # of compute that every token takes in addition to its products
    link: float | None = None  # bytes/s from a card to others, each way; None: not known
    host_link: float | None = None  # bytes/s from its host's memory to a card; None: not known
    cards: int = 1

    def __post_init__(self) -> None:
        for field in ("compute", "bandwidth", "memory"):
            if not getattr(self, field) > 0:
                raise ParameterError(
                    f"{field} of a device must be positive, got {getattr(self, field)} for {self.name}"
                )
        for field in ("compute_efficiency", "bandwidth_efficiency", "attention_efficiency", "weight_efficiency"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 1:
                raise ParameterError(f"{field} must lie in (0, 1], got {value} for {self.name}")
        if not 1 <= self.weight_overlap < math.inf:
            raise ParameterError(f"weight_overlap must be at least 1, got {self.weight_overlap} for {self.name}")
        if not self.expert_tile >= 1:
            raise ParameterError(f"expert_tile of a device must be at least 1, got {self.expert_tile} for {self.name}")
        for field in ("step_seconds", "token_seconds"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ParameterError(
                    f"{field} of a device must be at least 0, got {getattr(self, field)} for {self.name}"
                )
        for field in ("link", "host_link"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ParameterError(f"{field} of a device must be positive, got {value} for {self.name}")

    def group(self, cards: int) -> Hardware:
        """Combine so many devices into one (tensor parallelism); their collectives are assumed hidden."""
        if cards < 1:
            raise ParameterError(f"a group must have at least 1 device, got {cards}")
        return replace(
            self,
            name=self.name if cards == 1 else f"{cards} x {self.name}",
            compute=cards * self.compute,
            bandwidth=cards * self.bandwidth,
            memory=cards * self.memory,
            cards=cards * self.cards,
        )

    @property
    def flops(self) -> float:
        """The FLOP/s that products reach."""
        return self.compute * self.compute_efficiency

    @property
    def attention_flops(self) -> float:
        """The FLOP/s that attention over prompts reaches."""
        if self.attention_efficiency is None:
            return self.flops
        return self.compute * self.attention_efficiency

    @property
    def bytes_per_second(self) -> float:
        """The bytes/s that reads of KV reach."""
        return self.bandwidth * self.bandwidth_efficiency

    @property
    def weight_bytes_per_second(self) -> float:
        """The bytes/s that reads of weights reach."""
        if self.weight_efficiency is None:
            return self.bytes_per_second
        return self.bandwidth * self.weight_efficiency


def _table(*rows: tuple[str, float, float, float, float, float]) -> Mapping[str, Hardware]:
    return MappingProxyType(
        {
            name: Hardware(
                name=name,
                compute=tera * 1e12,
                bandwidth=giga * 1e9,
                memory=memory * 1e9,
                link=link * 1e9,
                host_link=host * 1e9,
            )
            for name, tera, giga, memory, link, host in rows
        }
    )


# Makers' data sheets: dense bf16 TFLOP/s (no sparsity), GB/s, GB, GB/s to other cards each way, by NVLink or Infinity
# Fabric where these connect all cards of a board, else by PCI Express; and GB/s from the host's memory.
GPUS: Mapping[str, Hardware] = _table(
    ("a10", 125, 600, 24, 32, 32),
    ("a100-40gb", 312, 1555, 40, 300, 32),
    ("a100-80gb", 312, 2039, 80, 300, 32),
    ("a5000", 111.1, 768, 24, 32, 32),
    ("a40", 149.7, 696, 48, 32, 32),
    ("a6000", 154.8, 768, 48, 32, 32),
    ("b200", 2250, 8000, 180, 900, 64),
    ("gh200", 989.4, 4000, 96, 450, 450),
    ("h100", 989.4, 3350, 80, 450, 64),
    ("h100-pcie", 756, 2000, 80, 64, 64),
    ("h20", 148, 4000, 96, 450, 64),
    ("h200", 989.4, 4800, 141, 450, 64),
    ("l4", 121, 300, 24, 32, 32),
    ("l40s", 362, 864, 48, 32, 32),
    ("mi250x", 383, 3277, 128, 400, 32),
    ("mi300x", 1307, 5300, 192, 448, 64),
    ("rtx-3090", 71, 936, 24, 32, 32),
    ("rtx-4090", 165.2, 1008, 24, 32, 32),
    ("rtx-5090", 209.5, 1792, 32, 64, 64),
)


_PCI_EXPRESS: Final = 32e9  # bytes/s each way, of the slowest that is common


def recognise(name: str) -> Hardware | None:
    """Find the GPU that a driver calls by this name: of the longest name in `GPUS` whose words it has. None: unknown.

    >>> [recognise(f"NVIDIA {name}").name for name in ("H100 80GB HBM3", "A100-SXM4-80GB", "GeForce RTX 4090")]
    ['h100', 'a100-80gb', 'rtx-4090']
    """
    words = set(name.lower().replace(" ", "-").split("-"))
    fitting = [known for known in GPUS if set(known.split("-")) <= words]
    if not fitting:
        return None
    found = GPUS[max(fitting, key=len)]
    has_other_links = "pcie" in words and "pcie" not in found.name
    return replace(found, link=_PCI_EXPRESS) if has_other_links else found


def link_of(name: str) -> float:
    """Return the bytes/s from a card to others, each way, by the name that its driver has for it.

    >>> [link_of(f"nvidia-{name}") / 1e9 for name in ("a100-sxm4-80gb", "a100-pcie-80gb", "l40s")]
    [300.0, 32.0, 32.0]
    """
    found = recognise(name)
    return _PCI_EXPRESS if found is None or found.link is None else found.link


def find_hardware(name: str, *, option: str = "hardware") -> Hardware:
    """Find the GPU of that name (see `GPUS`), in any case. Raises `ParameterError` of `option` for an unknown one.

    >>> find_hardware("a100-80gb").group(2).memory
    160000000000.0
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise refusal(option, f"be one of {', '.join(GPUS)}", name)
    return found


@cache
def measure_cpu(*, dtype_bytes: int = 4) -> Hardware:
    """Measure this CPU, in under a second and once: a float32 matrix product, a copy in memory.

    Both are what numpy reaches, so they are no ceilings: ours are taken to be `_ABOVE` times as high, and fitted steps
    may come to more than numpy does. With 2-byte weights the compute is scaled by the gain of the instruction set: 8
    with AMX tiles, 2 with AVX-512 bf16, 1 without either.
    """
    gain = _bf16_gain() if dtype_bytes == 2 else 1.0
    return Hardware(
        name="cpu",
        compute=_ABOVE * remembered("flops", _matmul_flops, np.__version__) * gain,
        bandwidth=_ABOVE * remembered("bandwidth", _copy_bandwidth, np.__version__),
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        compute_efficiency=1 / _ABOVE,
        bandwidth_efficiency=1 / _ABOVE,
        weight_efficiency=1 / _ABOVE,
        weight_overlap=_WEIGHT_OVERLAP,
        expert_tile=1,
    )


def _best_seconds(work: object, budget: float) -> float:
    """Time the shortest of the runs that fit in `budget` seconds, after one that warms up."""
    assert callable(work)
    work()
    best, end = float("inf"), time.perf_counter() + budget
    while (start := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _matmul_flops() -> float:
    size = 768
    a = np.ones((size, size), np.float32)
    out = np.empty_like(a)
    return 2.0 * size**3 / _best_seconds(lambda: np.matmul(a, a, out=out), 0.15)


def _copy_bandwidth() -> float:
    source = np.ones(1 << 22, np.float64)  # 32 MiB: beyond the caches of most machines
    target = np.empty_like(source)
    return 2.0 * source.nbytes / _best_seconds(lambda: np.copyto(target, source), 0.15)


def _bf16_gain() -> float:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return 8.0 if "amx_bf16" in flags else 2.0 if "avx512_bf16" in flags else 1.0
