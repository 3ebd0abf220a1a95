"""The first rank of a host's cores as a platform, and what it starts the others with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.threads import threads_told
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.engine import RankedCpuEngine
from llmbatch.engine.ranks.cpu.messages import HostRank
from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory, shared_file
from llmbatch.engine.ranks.cpu.shares import HostShare, head_of
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.engine.ranks.plan import check_cores
from llmbatch.engine.ranks.team import RankTeam, start_team
from llmbatch.system.measurements import usable_cores

_RANK: Final = "llmbatch.engine.ranks.cpu.rank"


def first_of_cores(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks. Raises ParameterError."""
    check_cores(ranks, usable_cores())
    share = HostShare(HostCollectives(0, ranks), threads_of(ranks))
    return replace(platform, share=share, pack=share.pack, ranks=ranks)


def threads_of(ranks: int) -> int:
    """Return the threads of a rank: its share of those that this process was told to take."""
    return max(1, threads_told() // ranks)


def ranked_engine(engine: CpuEngine, loaded: LoadedModel, orders: RankOrders) -> RankedCpuEngine:
    """Start the other ranks of a share, and return the engine of all. Raises JobError where one does not come up."""
    collectives, threads = head_of(loaded.module).collectives, threads_of(orders.ranks)

    def build() -> RankTeam:
        with shared_file(orders.ranks) as file:
            memory = SharedMemory(file, 0, orders.ranks)
            others = [HostRank(orders, rank, threads, file) for rank in range(1, orders.ranks)]
            join = partial(collectives.join, memory)
            return RankTeam(_RANK, others, files=[file], join=join, leave=memory.open)

    return RankedCpuEngine(engine, loaded.module, start_team(build, orders.ranks))
