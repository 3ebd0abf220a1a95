"""The processor as a platform."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.decoder import join_layers
from llmbatch.engine.cpu.linear import pack_linears
from llmbatch.engine.model.outline import HOST_PAGE_SIZE, HOST_RUNNING
from llmbatch.engine.model.platform import Platform
from llmbatch.kernels.spec import AttentionSpec

_OPS: Final = CpuOps()


def _pack(model: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype) -> None:
    join_layers(model, specs, dtype, _OPS)
    pack_linears(model, dtype)


HOST: Final = Platform(
    torch.device("cpu"),
    _OPS,
    page_size=HOST_PAGE_SIZE,
    max_running=HOST_RUNNING,
    is_host=True,
    pack=_pack,
)
