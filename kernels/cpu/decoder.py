"""A decoder in one compiled call, from token ids to logits, for models that have the common parts.

Between the products of a layer little is computed, and a step of few rows would spend more time on the way into each
kernel than in it. Here the loop over layers is compiled, too, and each worker runs it: they meet after each part
(`workers`). The residual stays in float32 from the first layer to the last, so a branch is added to it unrounded, by
its product's own tile where no norm comes between. Weights have just passed through the caches when a step ends, and
Python that runs then finds nothing of itself in them: so the embedding, the last norm and the head are here as well,
where a model has no more around its layers.

Where ranks have a share of each layer, a branch is the sum of what all of them give. Each one writes its summand into
memory that all see; they meet, and each adds up all summands by itself, in the order of ranks: so all have the same
residual. A step of many rows does so for some rows after others. There are two blocks of that memory, used in turn:
who writes one again has met the others in between, and they had read it then.

In the last layer, nobody reads more of most prompt tokens than their keys and values. The rows whose states are wanted
move to the front once these are written, and all that follows is computed for them alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import prange, typeof, types
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.attention import attend_share
from llmbatch.kernels.cpu.blocks import Blocks
from llmbatch.kernels.cpu.decoder_inputs import (
    ADDED,
    ATTENTION,
    DOWN,
    GATE_UP,
    GATED,
    OUT,
    QKV,
    STORED,
    WHOLE,
    Buffers,
)
from llmbatch.kernels.cpu.fused import inverse_norm, normalize_row, rotate_and_store_rows
from llmbatch.kernels.cpu.layout import Pages
from llmbatch.kernels.cpu.numerics import narrow, widen
from llmbatch.kernels.cpu.pointers import address_of, caller, data_of
from llmbatch.kernels.cpu.products import convert_rows, multiply_share
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.workers import Team, share_of, wait_for_all

_FETCHED: Final = 256 << 10  # bytes of a weight that a worker fetches while it waits: a part of the second cache


@compiled(fastmath={"contract"}, nogil=True, counted=False)
def _add_normalized(row: Any, weight: Any, epsilon: np.float32, target: Any) -> None:
    """Add RMSNorm of a row to `target`."""
    inverse = inverse_norm(row, weight.size, epsilon)
    for d in range(weight.size):
        target[d] += row[d] * inverse * weight[d]


@compiled(nogil=True, counted=False)
def _round(row: Any, target: Any) -> None:
    """Round a row to the numbers of `target`."""
    for d in range(target.size):
        target[d] = narrow(row[d], target[d])


@compiled(nogil=True, counted=False)
def _first_rows(buffers: Any, count: int) -> Any:
    """Return the rows of a step of so many."""
    return Buffers(
        buffers.residual[:count], buffers.branch[:count], buffers.normed[:count], buffers.packed[:count],
        buffers.attended[:count], buffers.inner[:count], buffers.converted[:count], buffers.scales[:count],
        buffers.attention[:count],
    )  # fmt: skip  # arguments in groups


@compiled(nogil=True, counted=False)
def _wait(layers: Any, layer: int, product: int, team: Any) -> None:
    """Wait for all workers, and fetch what this one reads of the weight of the next product."""
    panels, size = _coming(layers, layer, product, team)
    wait_for_all(team, panels + team.worker * size, min(size, _FETCHED))


@compiled(nogil=True, counted=False)
def _coming(layers: Any, layer: int, product: int, team: Any) -> Any:
    """Return the panels of a product, 4 being the first of the next layer, and the bytes of a worker's share."""
    number = product % 4
    size = layers.counts[number] // team.workers * layers.words[number] * 4 * COLUMNS
    return layers.panels[(layer + product // 4) % layers.panels.shape[0], number], size


@compiled(nogil=True, counted=False)
def _multiply(
    layers: Any, layer: int, product: int, code: int, x: Any, out: int, stride: int, step: int, buffers: Any, team: Any
) -> None:
    """Multiply x with the weight of a product; `out` is an address, `stride` and `step` bytes to rows and panels."""
    a, size = data_of(x), x.shape[1] * x.itemsize
    if buffers.scales.size > 0:
        first, end = share_of(x.shape[0], team.worker, team.workers)
        convert_rows(x, buffers.converted, buffers.scales, first, end)
        _wait(layers, layer, product, team)
        a, size = data_of(buffers.converted), buffers.converted.shape[1] * buffers.converted.itemsize
    following, share = _coming(layers, layer, product + 1, team)
    multiply_share(
        layers.codes[code], a, size, data_of(buffers.scales), x.shape[0],
        layers.panels[layer, product], layers.counts[product], layers.words[product],
        out, stride, step,
        layers.columns[layer, product], layers.columns_step,
        following, share, layers.alone, team.worker, team.workers,
    )  # fmt: skip  # arguments in groups
    _wait(layers, layer, product + 1, team)


@compiled(nogil=True, counted=False)
def _enter_branch(layers: Any, layer: int, norm: int, buffers: Any, team: Any) -> None:
    """Make the input of a branch from the residual."""
    first, end = share_of(buffers.normed.shape[0], team.worker, team.workers)
    for i in range(first, end):
        if layers.has_norm[norm]:
            normalize_row(buffers.residual[i], layers.norms[norm, layer], np.float32(layers.epsilon), buffers.normed[i])
        else:
            _round(buffers.residual[i], buffers.normed[i])
    _wait(layers, layer, QKV if norm == 0 else GATE_UP, team)


@compiled(nogil=True)
def parts_of(rows: int, columns: int, blocks: NDArray[np.float32]) -> int:
    """Return in how many parts ranks add up so many rows, as their blocks have room."""
    room: int = blocks.shape[2] // columns
    return (rows + room - 1) // room


@compiled(nogil=True, counted=False)
def _add_up(ranks: Any, turn: int, row: int, total: Any) -> None:
    """Add up what all ranks have given for a row."""
    first, given = row * total.size, ranks.blocks[turn]
    for d in range(total.size):
        total[d] = given[0, first + d]
    for rank in range(1, ranks.processes):
        for d in range(total.size):
            total[d] += given[rank, first + d]


@compiled(nogil=True, counted=False)
def _leave_branch(
    layers: Any, layer: int, product: int, norm: int, x: Any, ranks: Any, turn: int, buffers: Any, team: Any
) -> int:
    """Add the product of x to the residual, through a norm if the layer has one there; returns the next turn."""
    is_split, rows, columns = ranks.processes > 1, x.shape[0], buffers.residual.shape[1]
    if not is_split and not layers.has_norm[norm]:
        out = data_of(buffers.residual)
        _multiply(layers, layer, product, ADDED, x, out, 4 * columns, 4 * COLUMNS, buffers, team)
        return turn
    parts = parts_of(rows, columns, ranks.blocks) if is_split else 1
    for part in range(parts):
        low, high = rows * part // parts, rows * (part + 1) // parts
        out = data_of(buffers.branch)
        if is_split:
            out = data_of(ranks.blocks) + (turn * ranks.processes + ranks.rank) * ranks.blocks.shape[2] * 4
        _multiply(layers, layer, product, WHOLE, x[low:high], out, 4 * columns, 4 * COLUMNS, buffers, team)
        if is_split:
            wait_for_all(Team(ranks.arrived, ranks.processes * team.workers, team.worker))
        first, end = share_of(high - low, team.worker, team.workers)
        for i in range(low + first, low + end):
            total, residual = buffers.branch[i], buffers.residual[i]
            if is_split:
                _add_up(ranks, turn, i - low, total)
            if layers.has_norm[norm]:
                _add_normalized(total, layers.norms[norm, layer], np.float32(layers.epsilon), residual)
            else:
                for d in range(columns):
                    residual[d] += total[d]
        turn = 1 - turn
    _wait(layers, layer, product + 1, team)
    return turn


@compiled(nogil=True, counted=False)
def _normalize_together(layers: Any, layer: int, packed: Any, first: int, end: int) -> None:
    """Apply RMSNorm to all queries of a row together, and to all its keys, in the rows [first, end), where it is so."""
    queries, keys = layers.query_norms_together[layer], layers.key_norms_together[layer]
    begin = layers.query_heads * layers.width
    for i in range(first, end):
        if queries.size > 0:
            normalize_row(packed[i], queries, np.float32(layers.epsilon), packed[i])
        if keys.size > 0:
            normalize_row(packed[i, begin:], keys, np.float32(layers.epsilon), packed[i, begin:])


@compiled(nogil=True, counted=False)
def _move_wanted(step: Any, query_columns: int, buffers: Any, team: Any) -> None:
    """Move the residuals and the queries of wanted rows to the front; each worker does so in columns of its own."""
    residual, packed, wanted = buffers.residual, buffers.packed, step.wanted
    first, end = share_of(residual.shape[1], team.worker, team.workers)
    first_query, end_query = share_of(query_columns, team.worker, team.workers)
    for i in range(wanted.size):
        row = wanted[i]
        for d in range(first, end):
            residual[i, d] = residual[row, d]
        for d in range(first_query, end_query):
            packed[i, d] = packed[row, d]
    wait_for_all(team)


@compiled(nogil=True, counted=False)
def _embed(ends: Any, ids: Any, residual: Any, team: Any) -> None:
    """Take the embeddings of a worker's share of the tokens: the same rows that it normalises first."""
    first, end = share_of(ids.size, team.worker, team.workers)
    for i in range(first, end):
        row = ends.embedding[ids[i]]
        for d in range(row.size):
            residual[i, d] = widen(row[d])


@compiled(nogil=True, counted=False)
def _leave_layers(layers: Any, ends: Any, sampled: Any, residual: Any, samples: Any, team: Any) -> None:
    """Compute the logits of sampled rows."""
    normed, logits = samples.normed, samples.logits
    first, end = share_of(sampled.size, team.worker, team.workers)
    for i in range(first, end):
        normalize_row(residual[sampled[i]], ends.norm, np.float32(ends.epsilon), normed[i])
    wait_for_all(team)
    following, share = _coming(layers, 0, QKV, team)
    multiply_share(
        ends.code, data_of(normed), normed.shape[1] * normed.itemsize, 0, sampled.size,
        ends.panels, ends.panel_count, ends.words, data_of(logits), logits.shape[1] * logits.itemsize,
        COLUMNS * logits.itemsize, ends.columns, ends.columns_step,
        following, share, ends.alone, team.worker, team.workers,
    )  # fmt: skip  # arguments in groups


@compiled(nogil=True, counted=False)
def _run_share(
    layers: Any, ends: Any, step: Any, memory: Any, window_memory: Any, tables: Any, window_tables: Any,
    page_size: int, every_buffer: Any, samples: Any, ranks: Any, first: int, end: int, arrived: Any, workers: int,
    worker: int,
) -> None:  # fmt: skip  # arguments in groups
    """Do a worker's share of `run_layers`."""
    team, count = Team(arrived, workers, worker), layers.panels.shape[0]
    buffers, turn = _first_rows(every_buffer, step.turns.size), ranks.turn
    if first == 0 and ends.embedding.shape[0] > 0:
        _embed(ends, step.ids, buffers.residual, team)
    for layer in range(first, end):
        _enter_branch(layers, layer, 0, buffers, team)
        packed, inner = buffers.packed, buffers.inner
        row, panel = packed.shape[1] * packed.itemsize, COLUMNS * packed.itemsize
        _multiply(layers, layer, QKV, STORED, buffers.normed, data_of(packed), row, panel, buffers, team)
        angles, cut = step.angles[layer], step.cuts[layer]
        kind, place = step.places[layer]
        own, own_tables = (window_memory, window_tables) if kind else (memory, tables)
        pages = Pages(own[place], layers.width, page_size)
        begin, last = share_of(buffers.packed.shape[0], worker, workers)
        _normalize_together(layers, layer, buffers.packed, begin, last)
        rotate_and_store_rows(
            buffers.packed, begin, last, layers.query_heads, step.cosine[angles], step.sine[angles], step.turns,
            layers.query_norms[layer], layers.key_norms[layer], layers.epsilon, step.token_pages[kind],
            step.token_offsets, pages,
        )  # fmt: skip  # arguments in groups
        _wait(layers, layer, OUT, team)
        if layer == count - 1 and step.last < step.turns.size:
            _move_wanted(step, layers.query_heads * layers.width, buffers, team)
            buffers = _first_rows(every_buffer, step.last)
        attend_share(
            buffers.packed, buffers.attended, pages, own_tables, step.slots,
            Blocks(step.runs, step.firsts, step.bounds[cut]), layers.query_heads // own.shape[2],
            layers.scales[layer], layers.windows[layer], layers.softcaps[layer], layers.sinks[layer],
            buffers.attention, layers.codes[ATTENTION], worker,
        )  # fmt: skip  # arguments in groups
        _wait(layers, layer, OUT, team)
        turn = _leave_branch(layers, layer, OUT, 1, buffers.attended, ranks, turn, buffers, team)
        _enter_branch(layers, layer, 2, buffers, team)
        row, panel = inner.shape[1] * inner.itemsize, COLUMNS // 2 * inner.itemsize
        _multiply(layers, layer, GATE_UP, GATED, buffers.normed, data_of(inner), row, panel, buffers, team)
        turn = _leave_branch(layers, layer, DOWN, 3, buffers.inner, ranks, turn, buffers, team)
    if end == count and ends.norm.size > 0:
        _leave_layers(layers, ends, step.sampled, buffers.residual, samples, team)


_call_share = caller(lambda *given: given)


def share_code(arguments: tuple[Any, ...]) -> int:
    """Return the address of the code of a worker's share, for `run_layers` with these arguments."""
    return address_of(_run_share, (*map(typeof, arguments), types.int64))


@compiled(parallel=True, nogil=True)
def run_layers(
    code: int, layers: Any, ends: Any, step: Any, memory: Any, window_memory: Any, tables: Any, window_tables: Any,
    page_size: int, buffers: Any, samples: Any, ranks: Any, first: int, end: int, arrived: Any, workers: int,
) -> None:  # fmt: skip  # arguments in groups
    """Take the residual through the layers from the `first` on, before the `end`, in place.

    What is before the first layer is done with it, and what is behind the last one with that: `samples` are its
    results. `memory` and its tables are those of pages, and `window_memory` those of window pages, [layers, ...] of
    `page_shape` each. `buffers` have as many rows as the step has tokens, or more. `ranks` have as many workers each.
    `code` is that of `share_code`, `arrived` what `arrivals` makes, and all `workers` must run at once.
    """
    for worker in prange(workers):
        arguments = (
            layers, ends, step, memory, window_memory, tables, window_tables, page_size, buffers, samples, ranks,
            first, end, arrived, workers, worker,
        )  # fmt: skip  # arguments in groups
        _call_share(code, arguments)
