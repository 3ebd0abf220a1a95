"""The first rank as a platform, and what it starts the others with."""

from __future__ import annotations

import os
from dataclasses import replace

from llmbatch.arguments import refusal
from llmbatch.engine.config import EngineConfig
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.threads import threads_told
from llmbatch.engine.model.config import ModelConfig
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.model.platform import Platform
from llmbatch.engine.ranks.collectives import Collectives
from llmbatch.engine.ranks.engine import RankedEngine
from llmbatch.engine.ranks.messages import RankOrders
from llmbatch.engine.ranks.plan import check_cores
from llmbatch.engine.ranks.shares import Share, head_of
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.system.measurements import usable_cores


def first_rank(platform: Platform, ranks: int) -> Platform:
    """Return a platform on which models are the share of the first of so many ranks. Raises ParameterError."""
    if not platform.is_host:
        raise refusal("tensor_parallel", "be 1 on a GPU, since ranks are processes on cores (take device='cpu')", ranks)
    check_cores(ranks, usable_cores())
    share = Share(Collectives(0, ranks), threads_of(ranks))
    return replace(platform, share=share, pack=share.pack)


def threads_of(ranks: int) -> int:
    """Return the threads of a rank: its share of those that this process was told to take."""
    return max(1, threads_told() // ranks)


def orders_for(model: ModelConfig, config: EngineConfig) -> RankOrders:
    """Return what other ranks are started with, but for what differs between them and between engines."""
    dtype = model.layer_type or str(model.dtype).removeprefix("torch.")
    return RankOrders(
        rank=0,
        ranks=config.tensor_parallel,
        threads=threads_of(config.tensor_parallel),
        memory=-1,
        parent=os.getpid(),
        folder=model.folder,
        dtype=dtype,  # type: ignore[arg-type]  # torch has names for more types
        kv_cache_dtype=config.kv_cache_dtype,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        context_length=model.context_length,
        num_pages=0,
        window_pages=0,
        page_size=0,
    )


def with_ranks(engine: CpuEngine, loaded: LoadedModel, orders: RankOrders) -> RankedEngine:
    """Start the other ranks of a share, and return the engine of all. Raises JobError where one does not come up."""
    return RankedEngine(engine, loaded.module, RankTeam(orders, head_of(loaded.module).collectives))
