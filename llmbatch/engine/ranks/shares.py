"""A rank's share of a model: the weights that it keeps, and modules that put the shares together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from llmbatch.engine.ranks.collectives import Collectives, EmbeddingShare, HeadShare, SummedOutput, share_of
from llmbatch.engine.ranks.plan import Cut, SplitPlan


class Share:
    """Cuts a model while it is loaded: first weights, then, once they are laid out for the device, modules."""

    def __init__(self, collectives: Collectives) -> None:
        """Be the share of one rank."""
        self.collectives = collectives
        self._plan = SplitPlan()
        self._vocabulary = 0

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

    def put_together(self, model: nn.Module, head: type[HeadShare], *, sums: bool) -> None:
        """Replace embeddings and head, and with `sums` the ends of branches, by what asks all ranks."""
        for name in self._plan.sums if sums else ():
            _replace(model, name, SummedOutput(model.get_submodule(name), self.collectives))
        tokens = share_of(self.collectives.rank, self.collectives.ranks, self._vocabulary)
        embedding = model.get_submodule(self._plan.embedding)
        _replace(model, self._plan.embedding, EmbeddingShare(embedding, tokens, self.collectives))
        _replace(model, self._plan.head, head(model.get_submodule(self._plan.head), self._vocabulary, self.collectives))

    def _kept(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Copy the part of a tensor that this rank has."""
        parts = []
        for block in tensor.chunk(cut.blocks, cut.dim):
            own = share_of(self.collectives.rank, self.collectives.ranks, block.shape[cut.dim])
            parts.append(block.narrow(cut.dim, own.start, len(own)))
        return torch.cat(parts, cut.dim)  # which copies one part, too


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
