"""A rank's share of a model: the weights that it keeps, and modules that put the shares together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import torch
from torch import nn
from transformers import PretrainedConfig

from llmbatch.engine.cpu.joined_layers import join_layers
from llmbatch.engine.cpu.linear import PackedLinear, pack_linears
from llmbatch.engine.cpu.platform import BY_MODULE, OPS, bits_here
from llmbatch.engine.model.platform import Packed, Streaming
from llmbatch.engine.ranks.collectives import Collectives, EmbeddingShare, HeadShare, SummedOutput
from llmbatch.engine.ranks.plan import Cut, SplitPlan
from llmbatch.kernels.spec import AttentionSpec


class Share:
    """Cuts a model while it is loaded (`llmbatch.engine.model.platform.ModelShare`): first weights, then modules."""

    def __init__(self, collectives: Collectives, threads: int) -> None:
        """Be the share of one rank, that computes on so many threads."""
        self.collectives = collectives
        self.threads = threads
        self._plan = SplitPlan()
        self._vocabulary = 0

    def enter(self) -> None:
        """Leave the other cores to the other ranks."""
        numba.set_num_threads(self.threads)  # first: where it launches threads, it tells OpenMP, and so torch, of all
        torch.set_num_threads(self.threads)

    def cut(self, folder: str, module: nn.Module, config: PretrainedConfig) -> None:
        """Drop, in place, the weights that other ranks have; one tensor at a time. Raises ModelError."""
        self._plan = SplitPlan.of(folder, module)
        self._vocabulary = len(module.get_parameter(f"{self._plan.embedding}.weight"))
        cut: set[nn.Parameter] = set()  # embeddings and head may be one
        for one in self._plan.cuts:
            tensor = module.get_parameter(one.tensor)
            if tensor not in cut:
                tensor.data = self._kept(tensor.data, one)
                cut.add(tensor)
        if self.collectives.rank > 0:
            for name in self._plan.once:
                module.get_parameter(name).data.zero_()
        for part in module.modules():
            _tell_sizes(part)

    def pack(
        self,
        model: nn.Module,
        specs: dict[int, AttentionSpec],
        dtype: torch.dtype,
        *,
        layer_bits: int | None,
        streaming: Streaming | None,
    ) -> Packed:
        """Pack the layers of a fused model (`llmbatch.engine.model.platform.Packer`), and put shares together."""
        assert streaming is None, "a share stays in memory"
        layer_bits, notes = bits_here(layer_bits)
        joined = join_layers(model, specs, dtype, OPS, layer_bits=layer_bits, sums=self.collectives)
        pack_linears(model, dtype, layer_bits=layer_bits)
        for name in self._plan.sums if joined is None else ():
            _replace(model, name, SummedOutput(model.get_submodule(name), self.collectives))
        tokens = self.collectives.share_of(self._vocabulary)
        embedding = model.get_submodule(self._plan.embedding)
        _replace(model, self._plan.embedding, EmbeddingShare(embedding, tokens, self.collectives))
        head = model.get_submodule(self._plan.head)
        _replace(model, self._plan.head, HeadShare(head, self._vocabulary, self.collectives))
        return Packed((*notes, BY_MODULE) if joined is None else notes)

    def _kept(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Copy the part of a tensor that this rank has."""
        parts = []
        for block in tensor.chunk(cut.blocks, cut.dim):
            own = self.collectives.share_of(block.shape[cut.dim])
            parts.append(block.narrow(cut.dim, own.start, len(own)))
        return torch.cat(parts, cut.dim).clone()


def head_of(model: nn.Module) -> HeadShare:
    """Return the head of a share."""
    return next(part for part in model.modules() if isinstance(part, HeadShare))


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's weights, packed ones among them."""
    plain = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    return sum(plain.values()) + sum(part.packed.panels.nbytes for part in _packed(model))


def _packed(model: nn.Module) -> Iterator[PackedLinear]:
    return (part for part in model.modules() if isinstance(part, PackedLinear))


def _tell_sizes(part: Any) -> None:
    """Let a module that was cut say so."""
    if type(part) is nn.Linear:
        part.out_features, part.in_features = part.weight.shape
    elif isinstance(part, nn.Embedding):
        part.num_embeddings = len(part.weight)
        part.padding_idx = None  # it says which row learns nothing, and nothing learns here


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, replacement)
