"""Ranks add up and gather what they have in shared memory. They are threads here, as processes are to that memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.shared_memory import BLOCK, SharedMemory
from llmbatch.engine.ranks.reports import RankLost
from llmbatch.errors import JobError
from tests.support.ranks import shared_file


def on_ranks(ranks: int, compute: Callable[[HostCollectives], Any]) -> list[Any]:
    """What each rank computes with the others."""

    def run(rank: int) -> Any:
        collectives = HostCollectives(rank, ranks)
        collectives.join(SharedMemory(memory, rank, ranks))
        return compute(collectives)

    with shared_file(ranks) as memory, ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@given(
    ranks=st.integers(2, 3),
    sizes=st.lists(st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_all_ranks_have_the_sum_of_what_each_gives(ranks: int, sizes: list[int], seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    given = [[torch.randn(1, size, generator=drawn) for _ in range(ranks)] for size in sizes]
    found = on_ranks(ranks, lambda own: [own.sum(of_all[own.rank].clone()) for of_all in given])
    for totals in found:
        for total, of_all in zip(totals, given, strict=True):
            assert torch.equal(total, torch.stack(of_all).sum(0))


def test_a_sum_of_bfloat16_is_rounded_once() -> None:
    given = [torch.tensor([1.0, 256.0]), torch.tensor([2**-8, 1.0]), torch.tensor([2**-8, 1.0])]
    found = on_ranks(3, lambda own: own.sum(given[own.rank].bfloat16()))
    assert [total.tolist() for total in found] == [[1.0078125, 258.0]] * 3


def test_the_first_rank_gathers_what_all_have() -> None:
    rows = BLOCK // 100 + 3
    found = on_ranks(2, lambda own: own.gather(torch.full((rows, 100), float(own.rank), dtype=torch.bfloat16)))
    assert [[int(part.unique()) for part in parts] for parts in found] == [[0, 1], []]
    assert [part.shape for part in found[0]] == [(rows, 100)] * 2


def test_the_memory_has_no_name_that_a_kill_would_leave() -> None:
    with shared_file(2) as memory:
        assert os.fstat(memory).st_nlink == 0


def test_memory_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    said = (
        r"^the [\d,]+ bytes in which tensor_parallel=2 ranks meet must fit in memory, got "
        r"'Cannot allocate memory': take fewer ranks \(--tensor-parallel\)$"
    )
    with pytest.raises(JobError, match=said), shared_file(2):
        pass


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    with shared_file(2) as memory:
        first, second = (SharedMemory(memory, rank, 2) for rank in range(2))
        second.open()
        with pytest.raises(RankLost, match=r"^a rank does not answer$"):
            HostCollectives(0, 2).join(first)
        with pytest.raises(RankLost, match=r"^a rank does not answer$"):
            first.exchange(torch.zeros(1))
