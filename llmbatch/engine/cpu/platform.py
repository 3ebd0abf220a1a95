"""The processor as a platform."""

from __future__ import annotations

from typing import Final

import torch

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.linear import pack_linears
from llmbatch.engine.model.outline import HOST_PAGE_SIZE, HOST_RUNNING
from llmbatch.engine.model.platform import Platform

HOST: Final = Platform(
    torch.device("cpu"),
    CpuOps(),
    page_size=HOST_PAGE_SIZE,
    max_running=HOST_RUNNING,
    is_host=True,
    pack=pack_linears,
)
