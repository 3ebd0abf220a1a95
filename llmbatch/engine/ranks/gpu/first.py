"""The first rank of several GPUs as a platform, and what it starts the others with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from llmbatch.arguments import refusal
from llmbatch.engine.gpu.graphs.recorder import Recorder
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.collectives import HeadShare
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.engine import AgreedTimes, RankedGpuEngine, ToldFollowers
from llmbatch.engine.ranks.gpu.meeting import Meeting, keep_at_exit
from llmbatch.engine.ranks.gpu.messages import DeviceRank, OtherDevices
from llmbatch.engine.ranks.gpu.shares import DeviceShare
from llmbatch.engine.ranks.orders import RankOrders
from llmbatch.engine.ranks.team import RankTeam, start_team
from llmbatch.kernels.interface import PagedAttention

_RANK: Final = "llmbatch.engine.ranks.gpu.rank"


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


def ranked_engine(
    loaded: LoadedModel,
    attention: PagedAttention,
    orders: RankOrders,
    devices: OtherDevices,
    *,
    recorder: Callable[[], Recorder] | None,
    **given: Any,
) -> RankedGpuEngine:
    """Start the other ranks of a share, and return the engine of all, which takes what is `given` too.

    Raises JobError where a rank does not come up.
    """
    collectives: Any = next(part for part in loaded.module.modules() if isinstance(part, HeadShare)).collectives
    device = loaded.device

    def build() -> RankTeam:
        meeting = Meeting()
        others = [DeviceRank(orders, devices, recorder, rank, meeting.port) for rank in range(1, orders.ranks)]
        return RankTeam(_RANK, others, join=partial(collectives.join, meeting, device), leave=meeting.leave)

    team = start_team(build, orders.ranks)
    keep_at_exit()
    return RankedGpuEngine(
        loaded,
        attention,
        num_pages=orders.num_pages,
        window_pages=orders.window_pages,
        page_size=orders.page_size,
        recorder=None if recorder is None else AgreedTimes(recorder(), collectives, device),
        followers=ToldFollowers(team, collectives),
        team=team,
        **given,
    )
