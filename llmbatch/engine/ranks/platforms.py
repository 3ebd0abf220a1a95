"""The first rank as a platform, and what starts the others: on a host's cores, or on its GPUs."""

from __future__ import annotations

from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.cpu.first import first_of_cores, teams_on_cores
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.engine.ranks.teams import RankTeams


def first_rank(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks.

    Raises ParameterError where there are too few cores or GPUs.
    """
    if platform.is_host:
        return first_of_cores(platform, ranks)
    from llmbatch.engine.ranks.gpu.first import first_of_gpus  # needs Triton

    return first_of_gpus(platform, ranks)


def other_ranks(platform: Platform, orders: RankOrders) -> RankTeams:
    """Return what starts the other ranks, where the platform is that of `first_rank`."""
    if platform.is_host:
        return teams_on_cores(platform, orders)
    from llmbatch.engine.ranks.gpu.first import teams_on_gpus  # needs Triton

    return teams_on_gpus(platform, orders)
