"""Ranks run their shares of layers in the compiled loop. They are threads here, as processes are to their memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numba
import pytest
import torch

from llmbatch.engine.cpu.mixture.experts import Experts
from llmbatch.engine.cpu.platform import BY_MODULE, HOST
from llmbatch.engine.model.config import DType
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.engine.ranks.cpu import collectives, shared_memory
from llmbatch.engine.ranks.cpu.collectives import HostCollectives
from llmbatch.engine.ranks.cpu.shared_memory import SharedMemory
from llmbatch.engine.ranks.cpu.shares import HostShare, head_of
from llmbatch.kernels.cpu.tiles.vector_ir import HAS_INT8
from tests.support.logits import logits
from tests.support.models import of_all_experts, tiny_model_folder
from tests.support.ranks import shared_file

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
INTEGERS = pytest.mark.skipif(not HAS_INT8, reason="this processor cannot multiply int8")
STEPS = 2
WIDTH = 32  # elements of a state of the tiny models


@pytest.fixture
def threads() -> Iterator[None]:
    """Give threads back that a share left to others."""
    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


def share_of(folder: str, rank: int, workers: int, dtype: DType = "float32") -> tuple[HostCollectives, LoadedModel]:
    """A rank of two."""
    ranks = HostCollectives(rank, 2)
    share = HostShare(ranks, workers)
    share.enter()
    return ranks, load_model(folder, dtype=dtype, platform=replace(HOST, share=share, pack=share.pack))


def logits_of(shares: list[tuple[HostCollectives, LoadedModel]], workers: int) -> list[torch.Tensor]:
    """What two ranks give at each step, once it is seen that they have the same states."""
    states: SimpleQueue[torch.Tensor] = SimpleQueue()
    head_of(shares[0][1].module).send = states.put

    def first_rank(own: SharedMemory) -> list[torch.Tensor]:
        ranks, loaded = shares[0]
        ranks.join(own)
        return [logits(loaded) for _ in range(STEPS)]

    def second_rank(own: SharedMemory) -> None:
        ranks, loaded = shares[1]
        head = head_of(loaded.module)
        kept: list[torch.Tensor] = []
        head.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        ranks.join(own)
        for step in range(STEPS):
            logits(loaded)
            of_first = states.get()
            assert torch.equal(of_first, kept[step]), "ranks have the same states"
            head.answer(of_first)

    def be(rank: int) -> Any:
        numba.set_num_threads(workers)
        own = SharedMemory(memory, rank, 2)
        try:
            return (first_rank, second_rank)[rank](own)
        except BaseException:
            own.open()  # so that the other one does not wait
            raise

    with shared_file(2) as memory, ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(be, range(2))
    return list(found)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rows_at_once", [3, 64])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_shares_add_up_to_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rows_at_once: int, workers: int
) -> None:
    """Gemma 2 normalises what a branch gives, so it must do that to the sum of all ranks."""
    for module in (collectives, shared_memory):
        monkeypatch.setattr(module, "BLOCK", rows_at_once * WIDTH)
    folder = tiny_model_folder(tmp_path, family)
    expected = logits(load_model(folder, dtype="float32", platform=HOST))
    shares = [share_of(folder, rank, workers) for rank in range(2)]
    assert [loaded.notes for _, loaded in shares] == [(), ()]
    for step in logits_of(shares, workers):
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4)


def experts_in(loaded: LoadedModel) -> list[Experts]:
    return [module for module in loaded.module.modules() if isinstance(module, Experts)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", MIXTURES)
def test_shares_of_experts_are_packed_and_add_up_to_the_whole_model(tmp_path: Path, family: str) -> None:
    folder = tiny_model_folder(tmp_path, family)
    whole = load_model(folder, dtype="float32", platform=replace(HOST, pack=None))
    expected = logits(whole)
    routed = sum(name.endswith("experts.gate_up_proj") for name, _ in whole.module.named_parameters())
    assert routed > 0
    shares = [share_of(folder, rank, 1) for rank in range(2)]
    assert [len(experts_in(loaded)) for _, loaded in shares] == [routed, routed]
    for step in logits_of(shares, 1):
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4)


@INTEGERS
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_shares_of_experts_are_integers_where_layers_are(tmp_path: Path, family: str, dtype: DType) -> None:
    folder = of_all_experts(tiny_model_folder(tmp_path, family))
    expected = logits(load_model(folder, dtype="bfloat16", platform=HOST))
    shares = [share_of(folder, rank, 1, dtype) for rank in range(2)]
    for _, loaded in shares:
        of_all = [weight for experts in experts_in(loaded) for one in experts._experts for weight in one.products]
        assert {weight.bits for weight in of_all} == {{"int8": 8, "int4": 4}[dtype]}
        assert loaded.notes == (BY_MODULE,)
    for step in logits_of(shares, 1):
        assert (step - expected).norm() < 0.15 * expected.norm()  # as on one process


@pytest.mark.usefixtures("threads")
def test_shares_whose_layers_run_one_by_one_say_so(tmp_path: Path) -> None:
    _, loaded = share_of(tiny_model_folder(tmp_path, "gpt_oss"), 0, 1)
    assert loaded.notes == (BY_MODULE,)
