"""What a rank on cores other than the first does: it computes its share of each step till there are no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numba

from llmbatch.engine.cpu.attention import CpuKVCache
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.cpu.threads import threads_at_once
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.messages import HostRank, RankStates, RankStep
from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory
from llmbatch.engine.ranks.cpu.shares import HostShare, head_of
from llmbatch.engine.ranks.messages import receive
from llmbatch.engine.ranks.orders import EngineOrders
from llmbatch.engine.ranks.reports import reporting


def run(own: HostRank) -> None:
    """Be one rank, by what is on standard input, to the end of the process."""
    with reporting() as report_loaded:
        _run(own, report_loaded)


def _run(own: HostRank, report_loaded: Callable[[], None]) -> None:
    orders = own.orders
    memory = SharedMemory(own.memory, own.rank, orders.ranks)
    share = HostShare(HostCollectives(own.rank, orders.ranks), own.threads)
    share.enter()
    loaded = orders.load(replace(HOST, share=share, pack=share.pack))
    report_loaded()
    engine: EngineOrders | None = receive(sys.stdin.buffer)
    if engine is None:
        return
    orders.check_files(loaded, engine.files)
    pages = CpuKVCache(
        loaded.attention,
        num_pages=engine.num_pages,
        window_pages=engine.window_pages,
        page_size=engine.page_size,
        kv_type=loaded.kv_type,
    )
    numba.set_num_threads(threads_at_once())
    head = head_of(loaded.module)
    share.collectives.join(memory)
    while (message := receive(sys.stdin.buffer)) is not None:
        if isinstance(message, RankStep):
            message.run(loaded.module, pages)
        elif isinstance(message, RankStates):
            head.answer(message.states)
