"""The first rank as a platform: on a host's cores, or on its GPUs."""

from __future__ import annotations

from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.cpu.first import first_of_cores


def first_rank(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks.

    Raises ParameterError where there are too few cores or GPUs.
    """
    if platform.is_host:
        return first_of_cores(platform, ranks)
    from llmbatch.engine.ranks.gpu.first import first_of_gpus  # needs Triton

    return first_of_gpus(platform, ranks)
