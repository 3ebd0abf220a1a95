"""The layers of a model on the processor, in one compiled call; of a step that may be held, in one for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache
from llmbatch.engine.cpu.layer_forms import LayerParts, products_of
from llmbatch.engine.cpu.linear import PackedWeight
from llmbatch.engine.cpu.memory import as_array
from llmbatch.engine.model.number_type import WIDENED, bfloat16_rows
from llmbatch.kernels.cpu.attention import block_code
from llmbatch.kernels.cpu.blocks import SEQUENCE, join_blocks
from llmbatch.kernels.cpu.decoder import (
    ATTENTION,
    GATE_UP,
    OUT,
    QKV,
    Buffers,
    Layers,
    LayerStep,
    run_layers,
    share_code,
)
from llmbatch.kernels.cpu.products import ADD, CONVERTERS, STORE, STORE_FLOAT, rows_of_one_tile, tile_codes
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.workers import arrivals, workers_at_once
from llmbatch.kernels.spec import AttentionSpec

Tables = tuple[NDArray[np.int32], NDArray[np.int32]]  # of pages, and of window pages
Angles = tuple[torch.Tensor, torch.Tensor] | None  # cosine and sine of a layer's rotation; None: none
_NONE: Final = np.empty(0, np.int64)


class Decoder:
    """All layers of a model, with their packed weights."""

    def __init__(self, parts: list[LayerParts], specs: list[AttentionSpec], *, layer_bits: int | None) -> None:
        """Pack the weights of layers, one after the other."""
        self._dtype = parts[0].attention.o_proj.weight.dtype
        self._spec = specs[0]
        self._packed = [_pack(layer, layer_bits) for layer in parts]
        first = self._packed[0]
        self._hidden = first[QKV].width
        self._halves = parts[0].attention.halves
        norms = np.zeros((4, len(parts), self._hidden), np.float32)
        for place in range(4):
            for layer, part in enumerate(parts):
                norm = part.norms[place]
                if norm is not None:
                    norms[place, layer] = norm.scale.numpy()
        tiles = tile_codes(first[QKV].row_type)
        codes = [tiles[ending] for ending in (STORE, ADD, parts[0].mlp.activation, STORE_FLOAT)]
        self._layers = Layers(
            panels=np.array([[weight.panels.ctypes.data for weight in layer] for layer in self._packed], np.int64),
            columns=np.array([[weight.of_columns.ctypes.data for weight in layer] for layer in self._packed], np.int64),
            columns_step=first[QKV].of_columns[0].nbytes,
            words=np.array([weight.panels.shape[1] for weight in first], np.int64),
            counts=np.array([len(weight.panels) for weight in first], np.int64),
            alone=rows_of_one_tile(first[QKV].row_type),
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
            codes=np.array([*codes, 0], np.int64),  # attention's: that of `run`
        )
        self._specs = specs
        self._kinds = {spec.window: spec for spec in specs}
        self._cuts = np.array([list(self._kinds).index(spec.window) for spec in specs], np.int64)
        self._places_by_kind: dict[bool, NDArray[np.int64]] = {}  # by whether there are window pages
        self._activations = self._make_buffers(0)
        self._activations_between = self._make_buffers(0)  # of steps that are executed while another one is held
        self._code = 0  # of a worker's share
        self._kept: np.dtype[Any] | None = None  # the type of pages that it is for

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self._packed)

    def run(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: list[Angles],
        step: CpuAttention,
        wanted: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Run all layers: [1, tokens, hidden] to the same; `position_embeddings` are those of each layer.

        Of the rows only those that are `wanted` are returned, which must rise. None: all.
        """
        tokens = hidden_states.shape[1]
        if len(self._activations.residual) < tokens:
            # By twofold steps: memory that the C library had for slightly smaller ones would lie about unused.
            self._activations = self._make_buffers(1 << (tokens - 1).bit_length())
        parts: list[Any] = [buffer[:tokens] for buffer in self._activations]
        buffers = Buffers(*parts)
        torch.from_numpy(buffers.residual)[:, : self._hidden].copy_(hidden_states[0])
        last = buffers if wanted is None else Buffers(*[part[: len(wanted)] for part in parts])
        every, kind = step.pages.memory, (self._spec.heads, self._spec.width)
        memory = _pair({windows: every[*kind, windows] for windows in (False, True) if (*kind, windows) in every})
        layer_step, tables = self._layer_step(position_embeddings, step, wanted)
        inputs = self._layers, layer_step, *memory, *tables, step.pages.page_size, buffers, last
        if self._kept != memory[0].dtype:
            # First, since another process may be compiling attention.
            self._code = share_code((*inputs, 0, self.layers, arrivals(), 1))
            self._layers.codes[ATTENTION] = block_code(
                buffers.packed.dtype, buffers.attended.dtype, memory[0].dtype, buffers.attention.dtype
            )
            self._kept = memory[0].dtype
        if step.between is None:
            self._run_some(inputs, 0, self.layers)
        else:
            self._run_apart(inputs, step.between)
        return torch.from_numpy(last.residual)[:, : self._hidden].to(self._dtype)[None]

    def _run_apart(self, inputs: tuple[Any, ...], between: Callable[[], None]) -> None:
        """Run layer by layer, with `between` between two of them: other steps have activations of their own."""
        for layer in range(self.layers):
            if layer > 0:
                held, self._activations = self._activations, self._activations_between
                between()
                self._activations, self._activations_between = held, self._activations
            self._run_some(inputs, layer, layer + 1)

    def _run_some(self, inputs: tuple[Any, ...], first: int, end: int) -> None:
        """Run the layers [first, end) on as many workers as numba has threads."""
        threads = numba.get_num_threads()
        assert workers_at_once(threads) == threads, "workers would wait for one that does not run"
        run: Callable[..., None] = run_layers  # type checkers cannot count what is spread
        run(self._code, *inputs, first, end, arrivals(), threads)

    def _layer_step(
        self, position_embeddings: list[Angles], step: CpuAttention, wanted: NDArray[np.int64] | None
    ) -> tuple[LayerStep, Tables]:
        """Return the step as layers see it, with its tables of pages and of window pages."""
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
        plans = [step.plan(spec) for spec in self._kinds.values()]
        slots, cuts = plans[0].slots, self._cuts
        cut = [plan.blocks for plan in plans]
        if wanted is not None:
            alone = step.plan_of_rows(self._specs[-1], wanted)
            alone.blocks.runs[:, SEQUENCE] += len(slots)
            slots, cuts = np.concatenate((slots, alone.slots)), np.append(cuts[:-1], len(plans))
            cut.append(alone.blocks)
        blocks = join_blocks(cut, self._spec.heads)
        tables = {
            step.pages.in_windows(spec): plan.tables for spec, plan in zip(self._kinds.values(), plans, strict=True)
        }
        layer_step = LayerStep(
            cosine=as_array(cosine),
            sine=as_array(sine),
            angles=np.array([places[id(pair)] for pair in position_embeddings], np.int64),
            token_pages=np.stack((step.token_pages, step.window_token_pages)),
            token_offsets=step.token_offsets,
            places=self._places(step.pages),
            slots=slots,
            runs=blocks.runs,
            firsts=blocks.firsts,
            bounds=blocks.bounds,
            cuts=cuts,
            wanted=_NONE if wanted is None else wanted,
        )
        return layer_step, _pair(tables)

    def _places(self, pages: CpuKVCache) -> NDArray[np.int64]:
        """Return for each layer whether its KV is in window pages, and its place among those of which that is so."""
        if pages.windowed not in self._places_by_kind:
            apart = np.array([pages.in_windows(spec) for spec in self._specs], np.int64)
            places = np.where(apart, np.cumsum(apart), np.cumsum(1 - apart)) - 1
            self._places_by_kind[pages.windowed] = np.stack((apart, places), 1)
        return self._places_by_kind[pages.windowed]

    def _make_buffers(self, tokens: int) -> Buffers:
        first, element = self._packed[0], as_array(torch.empty(0, dtype=self._dtype)).dtype
        columns = [len(weight.panels) * COLUMNS for weight in first]
        kind = first[QKV].row_type
        wide = np.dtype(np.float32) if kind == WIDENED else element  # of what products take
        converted: NDArray[Any] = np.empty((tokens, 0), np.uint8)
        if kind in CONVERTERS and kind != WIDENED:
            converted = np.empty((tokens, max(weight.row_bytes for weight in first) // kind.itemsize), kind)
        return Buffers(
            residual=np.zeros((tokens, columns[OUT]), np.float32),
            branch=np.empty((tokens, columns[OUT]), np.float32),
            normed=np.empty((tokens, self._hidden), wide),
            packed=np.empty((tokens, columns[QKV]), element),
            attended=np.empty((tokens, self._spec.query_heads * self._spec.width), wide),
            inner=np.empty((tokens, columns[GATE_UP] // 2), wide),
            converted=converted,
            scales=np.empty(tokens if converted.size else 0, np.float32),
            attention=np.empty((tokens, 0), bfloat16_rows() if element == np.uint16 else element),
        )


def _pair(arrays: dict[bool, NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the array of pages and that of window pages, the same for both if all layers have the same kind."""
    first, last = min(arrays), max(arrays)
    return arrays[first], arrays[last]


def _pack(part: LayerParts, bits: int | None) -> list[PackedWeight]:
    """Pack the weights of a layer, and let go of them."""
    qkv, out, gate_up, down = products_of(part)
    width = gate_up.out_features // 2
    lanes = COLUMNS // 2
    panels = -(-width // lanes)
    columns = np.pad(np.arange(width), (0, panels * lanes - width), constant_values=-1)
    order = np.stack((columns, np.where(columns < 0, -1, columns + width))).reshape(2, panels, lanes)
    packed = [
        PackedWeight(_weights(qkv.take_layers()), bits=bits),
        PackedWeight(_weights([out], part.factor), bits=bits),
        PackedWeight(_weights(gate_up.take_layers()), order.swapaxes(0, 1).ravel(), bits=bits),
        PackedWeight(_weights([down], part.factor), padded=panels * lanes, bits=bits),
    ]
    out.weight = down.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return packed


def _weights(layers: Sequence[nn.Linear], factor: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return weights and biases, times a factor."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = [(layer.weight, layer.bias) for layer in layers]
    if factor == 1.0:
        return found
    return [(weight * factor, None if bias is None else bias * factor) for weight, bias in found]


def _head_norms(parts: list[LayerParts], side: str) -> NDArray[np.float32]:
    nothing = torch.empty(0)
    return np.stack([part.attention.norms.get(side, nothing).numpy() for part in parts])


def _sinks(spec: AttentionSpec) -> NDArray[np.float32]:
    return np.empty(0, np.float32) if spec.sinks is None else spec.sinks.numpy()


def _epsilon(part: LayerParts) -> float:
    return next(norm.epsilon for norm in part.norms if norm is not None)
