"""The process of a rank other than the first: computes its share of each step till there are no more."""

from __future__ import annotations

import sys
from dataclasses import replace

import numba

from llmbatch.engine.cpu.attention import CpuKVCache
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.cpu.threads import threads_at_once
from llmbatch.engine.model.loader import load_model
from llmbatch.engine.ranks.collectives import Collectives
from llmbatch.engine.ranks.messages import RankOrders, RankStates, RankStep, receive
from llmbatch.engine.ranks.shared_memory import RankLost, SharedMemory
from llmbatch.engine.ranks.shares import Share, head_of
from llmbatch.system.processes import end_with


def main() -> None:
    """Run as one rank by the orders on standard input."""
    orders: RankOrders = receive(sys.stdin.buffer)
    end_with(orders.parent)
    memory = SharedMemory(orders.memory, orders.rank, orders.ranks)
    share = Share(Collectives(orders.rank, orders.ranks), orders.threads)
    share.enter()
    loaded = load_model(
        orders.folder,
        dtype=orders.dtype,
        kv_cache_dtype=orders.kv_cache_dtype,
        load_format=orders.load_format,
        trust_remote_code=orders.trust_remote_code,
        context_length=orders.context_length,
        platform=replace(HOST, share=share, pack=share.pack),
    )
    pages = CpuKVCache(
        loaded.attention,
        num_pages=orders.num_pages,
        window_pages=orders.window_pages,
        page_size=orders.page_size,
        kv_type=loaded.kv_type,
    )
    numba.set_num_threads(threads_at_once())
    head = head_of(loaded.module)
    try:
        share.collectives.join(memory)
        while (message := receive(sys.stdin.buffer)) is not None:
            if isinstance(message, RankStep):
                message.run(loaded.module, pages)
            elif isinstance(message, RankStates):
                head.answer(message.states)
    except RankLost:
        sys.exit(1)  # the first one starts others
