"""The processor as a platform."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from llmbatch.engine.cpu.attention import CpuOps
from llmbatch.engine.cpu.joined_layers import join_layers
from llmbatch.engine.cpu.linear import pack_linears
from llmbatch.engine.cpu.mixture.packing import pack_experts
from llmbatch.engine.model.outline import HOST_PAGE_SIZE, HOST_RUNNING
from llmbatch.engine.model.platform import Packed, Platform, Streaming
from llmbatch.errors import ModelError
from llmbatch.kernels.spec import AttentionSpec

OPS: Final = CpuOps()
BY_MODULE: Final = "layers run module by module, which takes longer: they have no form that one loop can run"


def _pack(
    model: nn.Module,
    specs: dict[int, AttentionSpec],
    dtype: torch.dtype,
    *,
    layer_bits: int | None,
    streaming: Streaming | None,
) -> Packed:
    experts = pack_experts(model, dtype, streaming, layer_bits=layer_bits)
    streamed, notes = experts.streamed, experts.notes
    decoder = join_layers(
        model, specs, dtype, OPS, layer_bits=layer_bits, streaming=None if streamed is not None else streaming
    )
    if decoder is None:
        notes = (*notes, BY_MODULE)
        if streaming is not None and not experts.layers:
            raise ModelError(
                "the weights must all stay in memory, since the model's layers have no form that one loop can run: "
                "take weights='resident' (--weights resident)"
            )
    elif streamed is None:
        streamed = decoder.streamed_weights
    pack_linears(model, dtype, layer_bits=layer_bits)
    return Packed(notes, streamed)


HOST: Final = Platform(
    torch.device("cpu"),
    OPS,
    page_size=HOST_PAGE_SIZE,
    max_running=HOST_RUNNING,
    is_host=True,
    pack=_pack,
)
