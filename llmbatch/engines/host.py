"""The processor as a platform."""

from __future__ import annotations

from typing import Final

import torch

from llmbatch.engines.context import HostPieces
from llmbatch.engines.outline import HOST_PAGE_SIZE, HOST_RUNNING
from llmbatch.engines.platform import Platform

HOST: Final = Platform(
    torch.device("cpu"), HostPieces(), page_size=HOST_PAGE_SIZE, max_running=HOST_RUNNING, is_host=True
)
