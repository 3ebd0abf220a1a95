"""The first rank of a host's cores as a platform, and what starts the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmbatch.engine.cpu.threads import threads_told
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.messages import HostRank
from llmbatch.engine.ranks.cpu.rank import run
from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory, make_room
from llmbatch.engine.ranks.cpu.shares import HostShare
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.engine.ranks.plan import check_cores
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.engine.ranks.teams import RankTeams
from llmbatch.system.measurements import usable_cores


def first_of_cores(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks. Raises ParameterError."""
    check_cores(ranks, usable_cores())
    share = HostShare(HostCollectives(0, ranks), threads_of(ranks))
    return replace(platform, share=share, pack=share.pack, ranks=ranks)


def threads_of(ranks: int) -> int:
    """Return the threads of a rank: its share of those that this process was told to take."""
    return max(1, threads_told() // ranks)


def teams_on_cores(platform: Platform, orders: RankOrders) -> RankTeams:
    """Return what starts the other ranks of the platform's share."""
    share, ranks = platform.share, orders.ranks
    assert isinstance(share, HostShare), "the platform is that of `first_of_cores`"

    def start(processes: RankProcesses) -> RankTeam:
        make_room(processes.file, ranks)
        memory = SharedMemory(processes.file, 0, ranks)
        others = [HostRank(orders, rank, share.threads, processes.file) for rank in range(1, ranks)]
        join = partial(share.collectives.join, memory)
        return RankTeam(processes, [partial(run, other) for other in others], join=join, leave=memory.open)

    return RankTeams(start, ranks)
