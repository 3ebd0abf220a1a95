"""A model on the processor in one compiled call; of a step that may be held, in one for each layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmbatch.engine.cpu.attention import CpuAttention, CpuKVCache
from llmbatch.engine.cpu.layer_forms import LayerParts
from llmbatch.engine.cpu.layer_weights import describe_layers, pack_layers
from llmbatch.engine.cpu.linear import PackedLinear, row_type
from llmbatch.engine.cpu.memory import as_array, huge_pages
from llmbatch.engine.cpu.streamed_layers import StreamedLayers
from llmbatch.engine.model.fusion.modules import FusedNorm, Rotation
from llmbatch.engine.model.number_type import WIDENED, attention_rows
from llmbatch.kernels.cpu.attention import block_code
from llmbatch.kernels.cpu.blocks import SEQUENCE, join_blocks
from llmbatch.kernels.cpu.decoder import parts_of, run_layers, share_code
from llmbatch.kernels.cpu.decoder_inputs import (
    ATTENTION,
    GATE_UP,
    OUT,
    QKV,
    Buffers,
    Ends,
    LayerStep,
    Ranks,
    Samples,
)
from llmbatch.kernels.cpu.products import CONVERTERS, STORE_FLOAT, rows_of_one_tile, tile_code
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.workers import arrivals, workers_at_once
from llmbatch.kernels.spec import AttentionSpec

Tables = tuple[NDArray[np.int32], NDArray[np.int32]]  # of pages, and of window pages
Angles = tuple[torch.Tensor, torch.Tensor] | None  # cosine and sine of a layer's rotation; None: none
_NONE: Final = np.empty(0, np.int64)
_ALONE: Final = Ranks(1, 0, 0, arrivals(), np.empty((2, 1, 0), np.float32))
_FEW: Final = 2  # of so many tokens one is wanted at most: else the last layer is for all


@dataclass(frozen=True, slots=True)
class Around:
    """What a model is apart from its layers, if it does no more."""

    embed: nn.Module
    rotate: nn.Module  # by positions alone
    norm: FusedNorm
    head: PackedLinear


class LayerSums(Protocol):
    """Where ranks, of which each has a share of each layer, add up what these give."""

    def for_layers(self) -> Ranks:
        """Return what the loop over layers takes."""

    def pass_layers(self, rounds: int) -> None:
        """Take note of so many sums in that loop. Raises RankLost."""


class _Turns(NamedTuple):
    """The angles of a step: cosine and sine [kinds, angles, rotated], and which are whose."""

    cosine: NDArray[Any]
    sine: NDArray[Any]
    of_tokens: NDArray[np.int64]
    of_layers: NDArray[np.int64]


class Decoder:
    """All layers of a model, with their packed weights, and what is around them if it is known."""

    def __init__(
        self,
        parts: list[LayerParts],
        specs: list[AttentionSpec],
        around: Around | None,
        *,
        layer_bits: int | None,
        streamed: StreamedLayers | None = None,
        sums: LayerSums | None = None,
    ) -> None:
        """Pack the weights of layers, one after the other; `streamed` takes those that do not stay in memory.

        `sums`: of the ranks that have the other shares of these layers.
        """
        self._dtype = parts[0].attention.o_proj.weight.dtype
        self._element = as_array(torch.empty(0, dtype=self._dtype)).dtype
        self._spec = specs[0]
        self._packed = pack_layers(parts, layer_bits, streamed)
        self._streamed, self._sums = streamed, sums
        self.streamed_weights = None if streamed is None else streamed.open()
        self._hidden = self._packed[0][QKV].width
        self._rotations = [part.attention.rotation for part in parts]
        self._layers = describe_layers(parts, specs, self._packed)
        self._around = around
        nothing = np.empty((0, self._hidden), self._element)
        self._no_ends = Ends(nothing, np.empty(0, np.float32), 0.0, 0, 0, 0, 0, 0, 0, 0)
        self._ends = self._no_ends if around is None else _ends(around, nothing)
        self._table = _Turns(np.empty((1, 0, 0), self._element), np.empty((1, 0, 0), self._element), _NONE, _NONE)
        self._specs = specs
        self._kinds = {spec.window: spec for spec in specs}
        self._cuts = np.array([list(self._kinds).index(spec.window) for spec in specs], np.int64)
        self._places_by_kind: dict[bool, NDArray[np.int64]] = {}  # by whether there are window pages
        rows = around.head.packed.row_type if around is not None else row_type(self._dtype)
        self._head_rows = np.dtype(np.float32) if rows == WIDENED else self._element
        self._activations = self._make_buffers(0)
        self._activations_between = self._make_buffers(0)  # of steps that are executed while another one is held
        self._samples = self._make_samples(0)
        self._code = 0  # of a worker's share
        self._kept: np.dtype[Any] | None = None  # the type of pages that it is for

    def run(self, hidden_states: torch.Tensor, position_embeddings: list[Angles], step: CpuAttention) -> torch.Tensor:
        """Run all layers: [1, tokens, hidden] to the same; `position_embeddings` are those of each layer."""
        tokens = hidden_states.shape[1]
        residual = self._residual(tokens)
        torch.from_numpy(residual).copy_(hidden_states[0])
        turns = self._turns(position_embeddings, tokens)
        buffers = self._run(self._layer_step(_NONE, turns, step, None, _NONE), step, self._no_ends, self._samples)
        return torch.from_numpy(buffers.residual[:tokens, : self._hidden]).to(self._dtype)[None]

    def logits(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], step: CpuAttention, rows: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute the logits of some rows of a step, float32 [rows, vocabulary], in memory that is written again.

        What is around the layers must be known. Raises `IndexError` for a token that has no embedding.
        """
        assert self._around is not None, "the model's own forward knows more"
        if self._ends.embedding.shape[0] == 0:
            embedded = self._around.embed(torch.from_numpy(ids))
            torch.from_numpy(self._residual(len(ids))).copy_(embedded)
        elif int(ids.max()) >= self._ends.embedding.shape[0]:
            raise IndexError(f"tokens must be below {self._ends.embedding.shape[0]}, got {ids.max()}")
        wanted, sampled = None, rows
        if _FEW * len(rows) <= len(ids):
            wanted, sampled = np.unique(rows, return_inverse=True)
        if len(self._samples.normed) < len(rows):
            self._samples = self._make_samples(1 << (len(rows) - 1).bit_length())
        samples = self._samples  # a step that is executed meanwhile may make larger ones
        layer_step = self._layer_step(ids, self._turns_at(positions), step, wanted, sampled)
        self._run(layer_step, step, self._ends, samples)
        return torch.from_numpy(samples.logits[: len(rows), : self._around.head.out_features])

    def _run(self, prepared: tuple[LayerStep, Tables], step: CpuAttention, ends: Ends, samples: Samples) -> Buffers:
        """Run a step, and return where its activations are."""
        layer_step, tables = prepared
        self._residual(len(layer_step.turns))
        every, kind = step.pages.memory, (self._spec.heads, self._spec.width)
        memory = _pair({windows: every[*kind, windows] for windows in (False, True) if (*kind, windows) in every})
        buffers = self._activations
        ranks = _ALONE if self._sums is None else self._sums.for_layers()
        inputs = self._layers, ends, layer_step, *memory, *tables, step.pages.page_size, buffers, samples, ranks
        if self._kept != memory[0].dtype:
            # First, since another process may be compiling attention.
            self._code = share_code((*inputs, 0, len(self._packed), arrivals(), 1))
            self._layers.codes[ATTENTION] = block_code(
                buffers.packed.dtype, buffers.attended.dtype, memory[0].dtype, buffers.attention.dtype
            )
            self._kept = memory[0].dtype
        if step.between is None:
            self._run_some(inputs, 0, len(self._packed))
        else:
            self._run_apart(inputs, step.between)
        if self._sums is not None:
            parts = parts_of(len(layer_step.turns), buffers.branch.shape[1], ranks.blocks)
            self._sums.pass_layers(2 * len(self._packed) * parts)
        return buffers

    def _run_apart(self, inputs: tuple[Any, ...], between: Callable[[], None]) -> None:
        """Run layer by layer, with `between` between two of them: other steps have activations of their own."""
        for layer in range(len(self._packed)):
            if layer > 0:
                held, self._activations = self._activations, self._activations_between
                between()
                self._activations, self._activations_between = held, self._activations
            self._run_some(inputs, layer, layer + 1)

    def _run_some(self, inputs: tuple[Any, ...], first: int, end: int) -> None:
        """Run the layers [first, end) on as many workers as numba has threads, as those are there that are streamed."""
        threads = numba.get_num_threads()
        assert workers_at_once(threads) == threads, "workers would wait for one that does not run"
        run: Callable[..., None] = run_layers  # type checkers cannot count what is spread
        spans = [(first, end)] if self._streamed is None else self._streamed.spans(first, end, self._layers.panels)
        for begin, stop in spans:
            run(self._code, *inputs, begin, stop, arrivals(), threads)

    def _layer_step(
        self,
        ids: NDArray[np.int64],
        turns: _Turns,
        step: CpuAttention,
        wanted: NDArray[np.int64] | None,
        sampled: NDArray[np.int64],
    ) -> tuple[LayerStep, Tables]:
        """Return the step as layers see it, with its tables of pages and of window pages.

        `ids` are empty where states enter the layers, `sampled` where they leave them. `wanted` rise, None: all rows.
        """
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
            ids=ids,
            cosine=turns.cosine,
            sine=turns.sine,
            turns=turns.of_tokens,
            angles=turns.of_layers,
            token_pages=step.token_pages,
            token_offsets=step.token_offsets,
            places=self._places(step.pages),
            slots=slots,
            runs=blocks.runs,
            firsts=blocks.firsts,
            bounds=blocks.bounds,
            cuts=cuts,
            last=len(turns.of_tokens) if wanted is None else len(wanted),
            wanted=_NONE if wanted is None else wanted,
            sampled=sampled,
        )
        return layer_step, _pair(tables)

    def _turns(self, position_embeddings: list[Angles], tokens: int) -> _Turns:
        """Collect the angles that layers were given, those by which they rotate."""
        both = list(zip(self._rotations, position_embeddings, strict=True))
        given = [None if rotation is Rotation.NONE else pair for rotation, pair in both]
        kinds = {id(pair): rotation.angles(pair) for rotation, pair in zip(self._rotations, given, strict=True)}
        places = {key: place for place, key in enumerate(kinds)}
        rotating = next((pair for pair in kinds.values() if pair is not None), None)
        if rotating is None:
            cosine = sine = torch.empty(1, tokens, 0, dtype=self._dtype)
        else:
            unrotated = torch.ones_like(rotating[0]), torch.zeros_like(rotating[1])
            cosine, sine = (torch.stack([(pair or unrotated)[side][0] for pair in kinds.values()]) for side in range(2))
        of_layers = np.array([places[id(pair)] for pair in given], np.int64)
        return _Turns(as_array(cosine), as_array(sine), np.arange(tokens), of_layers)

    def _turns_at(self, positions: NDArray[np.int64]) -> _Turns:
        """Look up the angles of positions, which are kept as far as any step was."""
        if positions.max() >= self._table.cosine.shape[1]:
            assert self._around is not None
            every = torch.arange(1 << int(positions.max()).bit_length())[None]
            angles = self._around.rotate(torch.empty(1, dtype=self._dtype), position_ids=every)
            self._table = self._turns([angles] * len(self._packed), every.shape[1])
        return self._table._replace(of_tokens=positions)

    def _places(self, pages: CpuKVCache) -> NDArray[np.int64]:
        """Return for each layer whether its KV is in window pages, and its place among those of which that is so."""
        if pages.windowed not in self._places_by_kind:
            apart = np.array([pages.in_windows(spec) for spec in self._specs], np.int64)
            places = np.where(apart, np.cumsum(apart), np.cumsum(1 - apart)) - 1
            self._places_by_kind[pages.windowed] = np.stack((apart, places), 1)
        return self._places_by_kind[pages.windowed]

    def _residual(self, tokens: int) -> NDArray[np.float32]:
        """Make room for a step of so many tokens, and return where their states enter the layers."""
        if len(self._activations.residual) < tokens:
            # By twofold steps: memory that the C library had for slightly smaller ones would lie about unused.
            self._activations = self._make_buffers(1 << (tokens - 1).bit_length())
        return self._activations.residual[:tokens, : self._hidden]

    def _make_buffers(self, tokens: int) -> Buffers:
        first, element = self._packed[0], self._element
        columns = [len(weight.panels) * COLUMNS for weight in first]
        kind = first[QKV].row_type
        wide = np.dtype(np.float32) if kind == WIDENED else element  # of what products take
        converted: NDArray[Any] = np.empty((tokens, 0), np.uint8)
        if kind in CONVERTERS and kind != WIDENED:
            converted = huge_pages((tokens, max(weight.row_bytes for weight in first) // kind.itemsize), kind)
        return Buffers(
            residual=huge_pages((tokens, columns[OUT]), np.float32),
            branch=huge_pages((tokens, columns[OUT]), np.float32),
            normed=huge_pages((tokens, self._hidden), wide),
            packed=huge_pages((tokens, columns[QKV]), element),
            attended=huge_pages((tokens, self._spec.query_heads * self._spec.width), wide),
            inner=huge_pages((tokens, columns[GATE_UP] // 2), wide),
            converted=converted,
            scales=np.empty(tokens if converted.size else 0, np.float32),
            attention=np.empty((tokens, 0), attention_rows() if element == np.uint16 else element),
        )

    def _make_samples(self, rows: int) -> Samples:
        """Make memory for so many rows: to claim and clear it for each step takes half as long as their product."""
        columns = 0 if self._around is None else len(self._around.head.packed.panels) * COLUMNS
        return Samples(np.empty((rows, self._hidden), self._head_rows), huge_pages((rows, columns), np.float32))


def _ends(around: Around, nothing: NDArray[Any]) -> Ends:
    """Collect what compiled code takes of what is around layers; other modules than tables of embeddings stay apart."""
    embed, head = around.embed, around.head.packed
    is_table = type(embed) is nn.Embedding and embed.max_norm is None
    return Ends(
        embedding=_weights(embed) if is_table else nothing,
        norm=around.norm.scale.numpy(),
        epsilon=around.norm.epsilon,
        code=tile_code(STORE_FLOAT, head.row_type),
        panels=head.panels.ctypes.data,
        panel_count=len(head.panels),
        words=head.panels.shape[1],
        columns=head.of_columns.ctypes.data,
        columns_step=head.of_columns[0].nbytes,
        alone=rows_of_one_tile(head.row_type),
    )


def _weights(embed: Any) -> NDArray[Any]:
    return as_array(embed.weight.detach())


def _pair(arrays: dict[bool, NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the array of pages and that of window pages, the same for both if all layers have the same kind."""
    first, last = min(arrays), max(arrays)
    return arrays[first], arrays[last]
