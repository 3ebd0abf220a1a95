"""The process of a rank on cores other than the first: computes its share of each step till there are no more."""

from __future__ import annotations

import sys
from dataclasses import replace

import numba

from llmbatch.engine.cpu.attention import CpuKVCache
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.cpu.threads import threads_at_once
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.messages import HostRank, RankStates, RankStep
from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory
from llmbatch.engine.ranks.cpu.shares import HostShare, head_of
from llmbatch.engine.ranks.reports import reporting
from llmbatch.engine.ranks.team import receive
from llmbatch.system.processes import end_with


def main() -> None:
    """Run as one rank by the orders on standard input."""
    own: HostRank = receive(sys.stdin.buffer)
    end_with(own.orders.parent)
    with reporting():
        _run(own)


def _run(own: HostRank) -> None:
    orders = own.orders
    memory = SharedMemory(own.memory, own.rank, orders.ranks)
    share = HostShare(HostCollectives(own.rank, orders.ranks), own.threads)
    share.enter()
    loaded = orders.load(replace(HOST, share=share, pack=share.pack))
    pages = CpuKVCache(
        loaded.attention,
        num_pages=orders.num_pages,
        window_pages=orders.window_pages,
        page_size=orders.page_size,
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
