"""What a rank on a device other than the first does: it runs its share of what the first one runs."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from llmbatch.engine.attention_choice import choose_attention
from llmbatch.engine.generation.buffers import TokenBuffers
from llmbatch.engine.gpu.execution import Sequential
from llmbatch.engine.gpu.followers import FollowedBatch, NoFollowers
from llmbatch.engine.gpu.step_forward import StepForward
from llmbatch.engine.model.loader import LoadedModel
from llmbatch.engine.ranks.gpu.collectives import DeviceCollectives
from llmbatch.engine.ranks.gpu.engine import AgreedTimes
from llmbatch.engine.ranks.gpu.meeting import Meeting
from llmbatch.engine.ranks.gpu.messages import DeviceEngineOrders, DeviceRank, RankRecordings, RankScores
from llmbatch.engine.ranks.gpu.shares import DeviceShare
from llmbatch.engine.ranks.messages import receive
from llmbatch.engine.ranks.reports import reporting


def run(own: DeviceRank) -> None:
    """Be one rank, by what is on standard input, to the end of the process."""
    collectives = DeviceCollectives(own.rank, own.orders.ranks)
    with reporting() as report_loaded, torch.inference_mode():
        loaded = _load(own, collectives)
        report_loaded()
        engine: DeviceEngineOrders | None = receive(sys.stdin.buffer)
        if engine is None:
            return
        own.orders.check_files(loaded, engine.common.files)
        forward = _build(loaded, engine, collectives)
        collectives.join(Meeting(own.port), forward.device)
        while (message := receive(sys.stdin.buffer)) is not None:
            _follow(message, forward, collectives)


def _load(own: DeviceRank, collectives: DeviceCollectives) -> LoadedModel:
    """Load a rank's share."""
    share = DeviceShare(collectives)
    platform = replace(own.platform, share=share, pack=share.pack)
    platform.enter()
    return own.orders.load(platform)


def _build(loaded: LoadedModel, engine: DeviceEngineOrders, collectives: DeviceCollectives) -> StepForward:
    """Take the memory of a rank's pages."""
    pages = engine.common
    attention, _ = choose_attention(
        engine.attention,
        loaded.attention.values(),
        dtype=loaded.dtype,
        kv_dtype=getattr(torch, loaded.kv_type.name),
        device=loaded.device,
        page_size=pages.page_size,
    )
    recorder = None if engine.recorder is None else AgreedTimes(engine.recorder(), collectives, loaded.device)
    return StepForward(
        loaded,
        attention,
        TokenBuffers(loaded.eos_token_ids, None, 0, None),
        num_pages=pages.num_pages,
        window_pages=pages.window_pages,
        page_size=pages.page_size,
        execution=Sequential(),
        recorder=recorder,
        followers=NoFollowers(),
    )


def _follow(
    message: FollowedBatch | RankRecordings | RankScores, forward: StepForward, collectives: DeviceCollectives
) -> None:
    """Do as the first rank does."""
    match message:
        case FollowedBatch():
            forward.follow(message, collectives.give)
        case RankRecordings(decodes, mixed, rates):
            forward.record(decodes, mixed, rates)
        case RankScores(shape, dtype):
            states = torch.empty(shape, dtype=dtype, device=forward.device)
            collectives.give(states)
            for _ in forward.head_for(states).logits(states):
                pass
