"""The layers of a model on the processor, replaced by one module that runs them all in one compiled call.

A layer is taken if its parts are fused ones (`fused_modules`) and its sums are of one of three forms, with norms before
the branches (Llama, Qwen), after them (OLMo 2) or on both sides (Gemma 2 and 3). The form is known by trying: in one
run over three tokens each layer must give, to the bit, what the form makes of its parts. If any layer does not, none
is replaced: layers run as modules then, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.attention import CpuAttention
from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.cpu.memory import as_array
from llmbatch.engine.model.fused_modules import FusedAttention, FusedMLP, FusedNorm, replace_modules
from llmbatch.engine.model.ops import ModelOps
from llmbatch.kernels.cpu.attention import block_code
from llmbatch.kernels.cpu.decoder import GATE_UP, OUT, QKV, Buffers, Layers, LayerStep, run_layers
from llmbatch.kernels.cpu.dot_tiles import COLUMNS
from llmbatch.kernels.cpu.products import ADD, STORE, STORE_FLOAT, tile_code
from llmbatch.kernels.spec import AttentionSpec

_Angles = tuple[torch.Tensor, torch.Tensor] | None  # cosine and sine of a layer's rotation; None: none

_PROBE_TOKENS: Final = 3
# Names of norms: before attention, after it, before the MLP, after it.
_FORMS: Final = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer that is of a form."""

    attention: FusedAttention
    mlp: FusedMLP
    norms: tuple[FusedNorm | None, ...]  # as in `_FORMS`
    factor: float  # of both branches


class Decoder:
    """All layers of a model. They stand in its list as `_Place`s, and run when the last of them is called."""

    def __init__(self, parts: list[_Parts], specs: list[AttentionSpec], *, quantised: bool) -> None:
        """Pack the weights of layers, one after the other."""
        self._dtype = parts[0].attention.o_proj.weight.dtype
        self._spec = specs[0]
        self._quantised = quantised
        self._packed = [_pack(layer, quantised=quantised) for layer in parts]
        first = self._packed[0]
        self._hidden = first[QKV].width
        self._halves = parts[0].attention.halves
        norms = np.zeros((4, len(parts), self._hidden), np.float32)
        for place in range(4):
            for layer, part in enumerate(parts):
                norm = part.norms[place]
                if norm is not None:
                    norms[place, layer] = norm.scale.numpy()
        codes = [tile_code(ending, first[QKV].element) for ending in (STORE, ADD, parts[0].mlp.activation, STORE_FLOAT)]
        self._layers = Layers(
            panels=np.array([[weight.panels.ctypes.data for weight in layer] for layer in self._packed], np.int64),
            columns=np.array([[weight.of_columns.ctypes.data for weight in layer] for layer in self._packed], np.int64),
            columns_step=first[QKV].of_columns[0].nbytes,
            words=np.array([weight.panels.shape[1] for weight in first], np.int64),
            counts=np.array([len(weight.panels) for weight in first], np.int64),
            norms=norms,
            has_norm=np.array([norm is not None for norm in parts[0].norms]),
            query_norms=_head_norms(parts, "query_norm"),
            key_norms=_head_norms(parts, "key_norm"),
            epsilon=_epsilon(parts[0]),
            windows=np.array([spec.window for spec in specs], np.int64),
            scales=np.array([spec.scale for spec in specs], np.float32),
            softcaps=np.array([spec.softcap for spec in specs], np.float32),
            sinks=np.stack([_sinks(spec) for spec in specs]),
            query_heads=self._spec.query_heads,
            width=self._spec.width,
            codes=np.array([*codes, block_code(as_array(torch.empty(0, dtype=self._dtype)).dtype)], np.int64),
        )
        self._specs = specs
        self._activations = self._make_buffers(0)

    def run(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: list[_Angles],
        step: CpuAttention,
    ) -> torch.Tensor:
        """Run all layers: [1, tokens, hidden] to the same; `position_embeddings` are those of each layer."""
        tokens = hidden_states.shape[1]
        if len(self._activations.residual) < tokens:
            self._activations = self._make_buffers(tokens)
        parts: list[Any] = [buffer[:tokens] for buffer in self._activations]
        buffers = Buffers(*parts)
        residual = torch.from_numpy(buffers.residual)[:, : self._hidden]
        residual.copy_(hidden_states[0])
        memory = step.pages.memory[self._spec.heads, self._spec.width]
        run_layers(
            self._layers,
            self._layer_step(position_embeddings, step),
            memory,
            step.pages.page_size,
            buffers,
            numba.get_num_threads(),
        )
        return residual.to(self._dtype)[None]

    def _layer_step(self, position_embeddings: list[_Angles], step: CpuAttention) -> LayerStep:
        kinds = {id(pair): pair for pair in position_embeddings}
        places = {key: place for place, key in enumerate(kinds)}
        rotating = next((pair for pair in kinds.values() if pair is not None), None)
        if rotating is None:
            cosine = sine = torch.empty(1, len(step.token_pages), 0, dtype=self._dtype)
        else:
            unrotated = torch.ones_like(rotating[0]), torch.zeros_like(rotating[1])
            cosine, sine = (
                torch.stack(
                    [torch.cat(((pair or unrotated)[side][0],) * (1 + self._halves), -1) for pair in kinds.values()]
                )
                for side in range(2)
            )
        by_window = {spec.window: step.plan(spec) for spec in self._specs}
        plans = list(by_window.values())
        windows = list(by_window)
        return LayerStep(
            cosine=as_array(cosine),
            sine=as_array(sine),
            angles=np.array([places[id(pair)] for pair in position_embeddings], np.int64),
            token_pages=step.token_pages,
            token_offsets=step.token_offsets,
            tables=plans[0].tables,
            slots=plans[0].slots,
            starts=plans[0].starts,
            counts=plans[0].counts,
            rows=plans[0].rows,
            block_sequence=plans[0].block_sequence,
            block_first=plans[0].block_first,
            bounds=np.stack([plan.bounds for plan in plans]),
            cuts=np.array([windows.index(spec.window) for spec in self._specs], np.int64),
        )

    def _make_buffers(self, tokens: int) -> Buffers:
        first, element = self._packed[0], as_array(torch.empty(0, dtype=self._dtype)).dtype
        columns = [len(weight.panels) * COLUMNS for weight in first]
        return Buffers(
            residual=np.zeros((tokens, columns[OUT]), np.float32),
            branch=np.empty((tokens, columns[OUT]), np.float32),
            normed=np.empty((tokens, self._hidden), element),
            packed=np.empty((tokens, columns[QKV]), element),
            attended=np.empty((tokens, self._spec.query_heads * self._spec.width), element),
            inner=np.empty((tokens, columns[GATE_UP] // 2), element),
            quantised=np.empty((tokens, max(weight.width for weight in first) if self._quantised else 0), np.uint8),
            scales=np.empty(tokens if self._quantised else 0, np.float32),
        )


class _Place(nn.Module):
    """Where a layer was: it notes its angles, and the last one runs all layers."""

    def __init__(self, original: nn.Module, decoder: Decoder, calls: list[Any], *, last: bool) -> None:
        """Take the place of `original`, whose attributes models may read here."""
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, value)
        self._run = decoder.run
        self._calls = calls
        self._last = last

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: _Angles,
        llmbatch: CpuAttention,
        **_: Any,
    ) -> torch.Tensor:
        """Follow the contract of transformers' decoder layers, as models call them; returns [1, tokens, hidden]."""
        self._calls.append(position_embeddings)
        if not self._last:
            return hidden_states
        angles = self._calls.copy()
        self._calls.clear()
        return self._run(hidden_states, angles, llmbatch)


def join_layers(
    model: nn.Module, specs: dict[int, AttentionSpec], dtype: torch.dtype, pieces: ModelOps, *, quantised: bool = False
) -> bool:
    """Replace, in place, the layers of a fused `model` by a `Decoder`, if all are of one form; tells whether.

    `quantised`: their products are int8, if their widths are whole words of four.
    """
    layers = [module for module in model.modules() if isinstance(getattr(module, "self_attn", None), FusedAttention)]
    if len(layers) != len(specs):
        return False
    found: dict[nn.Module, _Parts] = {}
    outputs: list[torch.Tensor] = []

    def probe(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        parts = _parts(layer, given, named, out)
        if parts is not None:
            found[layer] = parts
        outputs.append(out)

    def run() -> torch.Tensor:
        ids = torch.arange(_PROBE_TOKENS)[None]
        step = pieces.probe_step(specs, dtype, _PROBE_TOKENS)
        logits: torch.Tensor = model(input_ids=ids, position_ids=ids, use_cache=False, llmbatch=step).logits
        return logits

    hooks = [layer.register_forward_hook(probe, with_kwargs=True) for layer in layers]
    expected = run()
    for hook in hooks:
        hook.remove()
    parts = [found[layer] for layer in layers if layer in found]
    ordered = [specs[layer] for layer in sorted(specs)]
    if len(parts) != len(layers) or not _alike(parts, ordered):
        return False
    for layer in layers:
        vars(layer)["forward"] = lambda x, last=layer is layers[-1], **_: outputs[-1] if last else x
    joined = torch.equal(run(), expected)
    for layer in layers:
        del vars(layer)["forward"]
    if not joined:  # something else reads what a layer returns
        return False
    whole = all(layer.in_features % 4 == 0 for layer in _linears(parts[0]))
    decoder = Decoder(parts, ordered, quantised=quantised and whole)
    calls: list[Any] = []
    places = {layer: _Place(layer, decoder, calls, last=layer is layers[-1]) for layer in layers}
    replace_modules(model, places.get)
    return True


def _parts(layer: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> _Parts | None:
    """Find the form of a layer from its call and its result."""
    if len(given) != 1 or not isinstance(getattr(layer, "mlp", None), FusedMLP) or not isinstance(out, torch.Tensor):
        return None
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    [hidden] = given
    for names in _FORMS:
        norms = tuple(None if name is None else getattr(layer, name, None) for name in names)
        if not all(norm is None if name is None else isinstance(norm, FusedNorm) for name, norm in zip(names, norms)):
            continue
        enter, leave, enter_mlp, leave_mlp = (norm if norm is not None else nn.Identity() for norm in norms)
        try:
            attended, _ = layer.self_attn(enter(hidden), **named)
        except TypeError:
            return None  # attention is given something else than the layer
        between = hidden + _scaled(leave(attended), factor)
        expected = between + _scaled(leave_mlp(layer.mlp(enter_mlp(between))), factor)
        # To the bit: a factor at a sum may move it less than the order of sums does, next to a large input.
        if torch.equal(out, expected):
            return _Parts(layer.self_attn, layer.mlp, norms, factor)
    return None


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def _alike(parts: list[_Parts], specs: list[AttentionSpec]) -> bool:
    """Tell whether one compiled loop can run all layers."""
    first, spec = parts[0], specs[0]
    return all(
        _shape(part) == _shape(first)
        and (spec.heads, spec.query_heads, spec.width) == (other.heads, other.query_heads, other.width)
        and (spec.sinks is None) == (other.sinks is None)
        and other.chunk == 0
        and (part.factor == 1.0 or part.norms[1] is None)
        for part, other in zip(parts, specs, strict=True)
    )


def _shape(part: _Parts) -> tuple[Any, ...]:
    epsilons = {norm.epsilon for norm in part.norms if norm is not None} | set(part.attention.epsilons)
    return (
        *((layer.out_features, layer.in_features) for layer in _linears(part)),
        tuple(norm is not None for norm in part.norms),
        tuple(part.attention.norms),
        part.attention.halves,
        part.mlp.activation,
        epsilons if len(epsilons) == 1 else object(),
    )


def _linears(part: _Parts) -> tuple[Any, ...]:
    """List the products of a layer, in their order."""
    return part.attention.qkv, part.attention.o_proj, part.mlp.gate_up, part.mlp.down_proj


def _pack(part: _Parts, *, quantised: bool) -> list[PackedWeight]:
    """Pack the weights of a layer, and let go of them."""
    stacked_qkv, out, stacked_gate_up, down = _linears(part)
    qkv, gate_up = stacked_qkv.joined(), stacked_gate_up.joined()
    width = gate_up.out_features // 2
    lanes = COLUMNS // 2
    panels = -(-width // lanes)
    columns = np.pad(np.arange(width), (0, panels * lanes - width), constant_values=-1)
    order = np.stack((columns, np.where(columns < 0, -1, columns + width))).reshape(2, panels, lanes)
    packed = [
        PackedWeight(qkv.weight, qkv.bias, quantised=quantised),
        PackedWeight(*_times(out, part.factor), quantised=quantised),
        PackedWeight(gate_up.weight, gate_up.bias, order.swapaxes(0, 1).ravel(), quantised=quantised),
        PackedWeight(*_times(down, part.factor), padded=panels * lanes, quantised=quantised),
    ]
    out.weight = down.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return packed


def _times(layer: nn.Linear, factor: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias: torch.Tensor | None = layer.bias
    if factor == 1.0:
        return layer.weight, bias
    return layer.weight * factor, None if bias is None else bias * factor


def _head_norms(parts: list[_Parts], side: str) -> NDArray[np.float32]:
    nothing = torch.empty(0)
    return np.stack([part.attention.norms.get(side, nothing).numpy() for part in parts])


def _sinks(spec: AttentionSpec) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if spec.sinks is None else spec.sinks.numpy()


def _epsilon(part: _Parts) -> float:
    return next(norm.epsilon for norm in part.norms if norm is not None)
