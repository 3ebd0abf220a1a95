"""The first rank of several GPUs as a platform, what starts the others, and the engine of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from llmbatch.arguments import refusal
from llmbatch.engine.gpu.graphs.recorder import Recorder
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.collectives import HeadShare
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.engine import AgreedTimes, RankedGpuEngine, ToldFollowers
from llmbatch.engine.ranks.gpu.meeting import Meeting, keep_at_exit
from llmbatch.engine.ranks.gpu.messages import DeviceEngineOrders, DeviceRank
from llmbatch.engine.ranks.gpu.rank import run
from llmbatch.engine.ranks.gpu.shares import DeviceShare
from llmbatch.engine.ranks.orders import EngineOrders, RankOrders
from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.engine.ranks.teams import RankTeams
from llmbatch.kernels.interface import PagedAttention


def first_of_gpus(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks, each on a GPU of its own.

    Others have the GPUs behind the platform's. Raises ParameterError where there are too few.
    """
    if platform.device.type == "cuda":
        first = platform.device.index or 0
        there = torch.cuda.device_count() - first
        if ranks > there:
            behind = f" from number {first} on" if first else ""
            raise refusal("tensor_parallel", f"be at most {there}, the GPUs{behind} that this process sees", ranks)
    share = DeviceShare(DeviceCollectives(0, ranks))
    return replace(platform, share=share, pack=share.pack, ranks=ranks)


def teams_on_gpus(platform: Platform, orders: RankOrders) -> RankTeams:
    """Return what starts the other ranks of the platform's share."""
    share, ranks = platform.share, orders.ranks
    assert isinstance(share, DeviceShare), "the platform is that of `first_of_gpus`"
    first = replace(platform, share=None, pack=None)

    def start(processes: RankProcesses) -> RankTeam:
        meeting = Meeting()
        others = [DeviceRank(orders, first, rank, meeting.port) for rank in range(1, ranks)]
        join = partial(share.collectives.join, meeting, platform.device)
        return RankTeam(processes, [partial(run, other) for other in others], join=join, leave=meeting.leave)

    return RankTeams(start, ranks)


def ranked_engine(
    loaded: LoadedModel,
    attention: PagedAttention,
    teams: RankTeams,
    pages: Mapping[str, int],
    *,
    recorder: Callable[[], Recorder] | None,
    **given: Any,
) -> RankedGpuEngine:
    """Meet the other ranks of a share, and return the engine of all, which takes what is `given` too.

    `pages` are those of `EngineOrders`, by their names. Raises JobError where a rank does not come up.
    """
    collectives: Any = next(part for part in loaded.module.modules() if isinstance(part, HeadShare)).collectives
    device = loaded.device
    team = teams.meet(DeviceEngineOrders(EngineOrders(files=loaded.files, **pages), attention.name, recorder))
    keep_at_exit()
    return RankedGpuEngine(
        loaded,
        attention,
        **pages,
        recorder=None if recorder is None else AgreedTimes(recorder(), collectives, device),
        followers=ToldFollowers(team, collectives),
        team=team,
        **given,
    )
