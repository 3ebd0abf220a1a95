"""What attention kernels are compiled for, whatever a step's items are."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
from triton import knobs

from llmbatch.kernels.triton.fp8 import ELEMENT

HOPPER: Final = 9  # the major number of its capability


class Features(NamedTuple):
    """What a kernel is compiled for, whatever its items are."""

    query: torch.dtype
    pages: torch.dtype
    device: torch.device
    group: int  # query heads a KV head
    width: int  # of a head
    size: int  # tokens of a page
    capped: bool
    windowed: bool
    sinks: bool

    @classmethod
    def of(
        cls, query: torch.Tensor, keys: torch.Tensor, group: int, window: int, softcap: float, sinks: object
    ) -> Features:
        """Collect what a call of `attend` asks for."""
        _, _, size, width = keys.shape
        return cls(query.dtype, keys.dtype, keys.device, group, width, size, softcap > 0, window > 0, sinks is not None)

    @property
    def product(self) -> torch.dtype:
        """The type in which queries meet keys: float16 over pages of e4m3, of which it holds every number."""
        return torch.float16 if self.pages == ELEMENT else self.query

    @property
    def capability(self) -> int:
        """The major number of the device's capability; 0 without one."""
        return torch.cuda.get_device_capability(self.device)[0] if self.device.type == "cuda" else 0

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernel."""
        return {
            "GROUP": self.group,
            "WIDTH": self.width,
            "PADDED": max(16, triton.next_power_of_2(self.width)),
            "SIZE": self.size,
            "CAPPED": self.capped,
            "WINDOWED": self.windowed,
            "SINKS": self.sinks,
            "PRECISION": "ieee" if self.product == torch.float32 else "tf32",
            # The interpreter's products take no bfloat16; those of a device are exact in float32, as these are.
            "WIDENED": knobs.runtime.interpret and self.product == torch.bfloat16,
        }
