"""Which weights of a model are cut for ranks, and how: by transformers' own plan.

A plan names modules by a pattern and a style. A colwise layer keeps some of its outputs, a rowwise one some of its
inputs, so that what it gives must be added up over ranks. Experts are cut in their inner width, all of them on every
rank: then ranks have the same work whatever the router chooses. Embeddings and head are cut by tokens.

gpt-oss has a plan for its embeddings alone. Its attention has the common names, and its experts are cut as others' are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from llmbatch.arguments import refusal
from llmbatch.engine.model.refusals import ANOTHER_ENGINE, unsupported
from llmbatch.errors import ModelError, ParameterError
from llmbatch.perf_model.shares import fitting_ranks, shared_counts

_LINEAR: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_WHOLE: Final = "replicated_with_grad_allreduce"  # on every rank
_LAST, _INNER, _ONCE = "last", "inner", "once"  # styles of our own, for what transformers has none
_GPT_OSS: Final = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.sinks": _LAST,
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj": _LAST,  # [experts, hidden, inner], gate and up by turns
    "model.layers.*.mlp.experts.gate_up_proj_bias": _LAST,
    "model.layers.*.mlp.experts.down_proj": _INNER,  # [experts, inner, hidden]
    "model.layers.*.mlp.experts.down_proj_bias": _ONCE,
    "model.layers.*.mlp.experts": "moe_tp_experts",
}
_OURS: Final = {"gpt_oss": _GPT_OSS}


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor of a model is cut: along `dim`, in each of its equal `blocks`."""

    tensor: str
    dim: int
    blocks: int = 1


@dataclass(slots=True)
class SplitPlan:
    """What a rank's share of a model is made by."""

    cuts: list[Cut] = field(default_factory=list)
    once: list[str] = field(default_factory=list)  # tensors that are added behind a sum: one rank alone has them
    sums: list[str] = field(default_factory=list)  # modules whose outputs are added up over ranks
    embedding: str = ""
    head: str = ""

    @classmethod
    def of(cls, folder: str, module: nn.Module) -> SplitPlan:
        """Read the plan of a model whose modules are still transformers' own. Raises ModelError."""
        plan = cls()
        for name, part, style in _styles(module):
            take = plan._take_tensor if isinstance(part, nn.Parameter) else plan._take_module
            if not take(name, part, style):
                raise _refused(folder, f"{name.rsplit('.', 1)[-1]} that transformers splits as {style}")
        if not any(name.endswith("o_proj") for name in plan.sums) or not plan.embedding or not plan.head:
            raise _refused(folder, "layers that transformers has no plan for")
        return plan

    def _take_tensor(self, name: str, tensor: nn.Parameter, style: str) -> bool:
        """Take note of a tensor that the plan names by itself; tells whether its style is known."""
        dims = {"packed_colwise": tensor.ndim - 2, "rowwise": tensor.ndim - 1, _LAST: tensor.ndim - 1, _INNER: 1}
        if style == _ONCE:
            self.once.append(name)
        elif style in dims:
            self.cuts.append(Cut(name, dims[style], 2 if style == "packed_colwise" else 1))
        return style in (_ONCE, _WHOLE) or style in dims

    def _take_module(self, name: str, part: Any, style: str) -> bool:
        """Take note of a module; tells whether its style is known."""
        last = name.rsplit(".", 1)[-1]
        rows = [Cut(f"{name}.{tensor}", 0) for tensor, _ in part.named_parameters(recurse=False)]
        if last == _EMBEDDING and style == "embedding_rowwise":
            self.embedding = name
            self.cuts += rows
        elif last == _HEAD and style == "colwise_gather_output":
            self.head = name
            self.cuts += rows
        elif style == "moe_tp_experts":
            self.sums.append(name)
        elif type(part) is nn.Linear and last in _LINEAR and style == "colwise":
            self.cuts += rows
        elif type(part) is nn.Linear and last in _LINEAR and style == "rowwise":
            self.cuts.append(Cut(f"{name}.weight", 1))
            self.once += [cut.tensor for cut in rows if cut.tensor.endswith("bias")]
            self.sums.append(name)
        else:
            return style == _WHOLE
        return True


def check_heads(folder: str, config: PretrainedConfig, ranks: int) -> None:
    """Check by a config that heads and inner widths are whole multiples of the ranks. Raises ParameterError."""
    for what, count in shared_counts(config):
        if count % ranks:
            raise ParameterError(
                f"tensor_parallel must divide the {count} {what} of model {folder!r}, got {ranks}: take "
                f"{' or '.join(map(str, fitting_ranks(config)))} (--tensor-parallel)",
                option="tensor_parallel",
                value=ranks,
            )


def check_cores(ranks: int, cores: int) -> None:
    """Check that each rank has a core. Raises ParameterError."""
    if ranks > cores:
        raise refusal("tensor_parallel", f"be at most {cores}, the cores that this process may use", ranks)


def _styles(module: Any) -> Iterator[tuple[str, Any, str]]:
    """List what the plan of a model names, with its style."""
    plan = {**(module.tp_plan or {}), **_OURS.get(module.config.model_type, {})}
    parts: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters(remove_duplicate=False))}
    for name, part in parts.items():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name))
        if style is not None:
            yield name, part, style


def _refused(folder: str, part: str) -> ModelError:
    supported = f"ranks split {', '.join(_LINEAR)} and experts, as transformers' plan says"
    return unsupported(folder, part, supported, f"leave out tensor_parallel (--tensor-parallel), or {ANOTHER_ENGINE}")
