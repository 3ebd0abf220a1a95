"""Layers of a decoder in one compiled call, for models whose layers have the common parts.

Between the products of a layer little is computed, and a step of few rows would spend more time on the way into each
kernel than in it. Here the loop over layers is compiled, too, and each worker runs it: they meet after each part
(`workers`). The residual stays in float32 from the first layer to the last, so a branch is added to it unrounded, by
its product's own tile where no norm comes between.

In the last layer, nobody reads more of most prompt tokens than their keys and values. The rows whose states are wanted
move to the front once these are written, and all that follows is computed for them alone.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import prange, typeof, types
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.kernels.cpu.attention import attend_share
from llmbatch.kernels.cpu.blocks import Blocks
from llmbatch.kernels.cpu.fused import inverse_norm, normalize_row, rotate_and_store_rows
from llmbatch.kernels.cpu.layout import Pages
from llmbatch.kernels.cpu.numerics import narrow
from llmbatch.kernels.cpu.pointers import address_of, caller, data_of
from llmbatch.kernels.cpu.products import convert_rows, multiply_share
from llmbatch.kernels.cpu.tiles.endings import COLUMNS
from llmbatch.kernels.cpu.workers import Team, share_of, wait_for_all

QKV, OUT, GATE_UP, DOWN = range(4)  # the products of a layer
_FETCHED: Final = 256 << 10  # bytes of a weight that a worker fetches while it waits: a part of the second cache
STORED, ADDED, GATED, WHOLE, ATTENTION = range(5)  # places in `Layers.codes`


class Layers(NamedTuple):
    """The weights and parameters of all layers, for compiled code."""

    panels: NDArray[np.int64]  # [layers, 4] addresses of packed weights
    columns: NDArray[np.int64]  # [layers, 4] addresses of what tiles read of columns
    columns_step: int  # bytes of that for a panel
    words: NDArray[np.int64]  # [4] of a column
    counts: NDArray[np.int64]  # [4] of panels
    alone: int  # rows that are one tile at most
    norms: NDArray[np.float32]  # [4, layers, hidden] before attention, after it, before the MLP, after it
    has_norm: NDArray[np.bool_]  # [4]
    query_norms: NDArray[np.float32]  # [layers, width of a head, or 0]
    key_norms: NDArray[np.float32]  # [layers, width of a head, or 0]
    epsilon: float
    windows: NDArray[np.int64]  # [layers]
    scales: NDArray[np.float32]  # [layers]
    softcaps: NDArray[np.float32]  # [layers]
    sinks: NDArray[np.float32]  # [layers, query heads, or 0]
    query_heads: int
    width: int  # of a head
    codes: NDArray[np.int64]  # of tiles: `STORED`, `ADDED`, `GATED`, `WHOLE`; of `ATTENTION`


class LayerStep(NamedTuple):
    """A step as layers see it."""

    cosine: NDArray[Any]  # [kinds, tokens, rotated]
    sine: NDArray[Any]
    angles: NDArray[np.int64]  # [layers] which of them
    token_pages: NDArray[np.int32]  # [2, tokens] pages, and window pages
    token_offsets: NDArray[np.int32]
    places: NDArray[np.int64]  # [layers, 2] which of these two, and which of the layers that have the same
    slots: NDArray[np.int32]
    runs: NDArray[np.int64]  # of `Blocks` of all kinds of window, one kind after the other; so are `firsts`
    firsts: NDArray[np.int64]
    bounds: NDArray[np.int64]  # [kinds of window, workers + 1]
    cuts: NDArray[np.int64]  # [layers] which of them
    wanted: NDArray[np.int64]  # rows that leave the last layer, which rise; not read where all do


class Buffers(NamedTuple):
    """Activations of a step, of the type of the weights unless said otherwise.

    Those that products take are float32 where rows of bfloat16 are widened: so nothing is converted.
    """

    residual: NDArray[np.float32]  # [tokens, hidden rounded up to panels]
    branch: NDArray[np.float32]  # likewise, what a norm takes before it is added
    normed: NDArray[Any]  # [tokens, hidden]
    packed: NDArray[Any]  # [tokens, columns of QKV]
    attended: NDArray[Any]  # [tokens, query heads * width]
    inner: NDArray[Any]  # [tokens, columns of the MLP]
    converted: NDArray[Any]  # [tokens, numbers of the widest input of a product, or 0] where products take other ones
    scales: NDArray[np.float32]  # [tokens, or 0] of its rows, if they are integers
    attention: NDArray[Any]  # [tokens, 0] like the rows of attention's products


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
    layers: Any, layer: int, product: int, code: int, x: Any, out: Any, step: int, buffers: Any, team: Any
) -> None:
    """Multiply x with the weight of a product; `step` is the columns of `out` that a panel makes."""
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
        data_of(out), out.shape[1] * out.itemsize, step * out.itemsize,
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


@compiled(nogil=True, counted=False)
def _leave_branch(layers: Any, layer: int, product: int, norm: int, x: Any, buffers: Any, team: Any) -> None:
    """Add the product of x to the residual, through a norm if the layer has one there."""
    if layers.has_norm[norm]:
        _multiply(layers, layer, product, WHOLE, x, buffers.branch, COLUMNS, buffers, team)
        first, end = share_of(buffers.branch.shape[0], team.worker, team.workers)
        for i in range(first, end):
            _add_normalized(
                buffers.branch[i], layers.norms[norm, layer], np.float32(layers.epsilon), buffers.residual[i]
            )
        _wait(layers, layer, product + 1, team)
    else:
        _multiply(layers, layer, product, ADDED, x, buffers.residual, COLUMNS, buffers, team)


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
def _run_share(
    layers: Any, step: Any, memory: Any, window_memory: Any, tables: Any, window_tables: Any, page_size: int,
    buffers: Any, last_buffers: Any, first: int, end: int, arrived: Any, workers: int, worker: int,
) -> None:  # fmt: skip  # arguments in groups
    """Do a worker's share of `run_layers`."""
    team = Team(arrived, workers, worker)
    for layer in range(first, end):
        _enter_branch(layers, layer, 0, buffers, team)
        _multiply(layers, layer, QKV, STORED, buffers.normed, buffers.packed, COLUMNS, buffers, team)
        angles, cut = step.angles[layer], step.cuts[layer]
        kind, place = step.places[layer]
        own, own_tables = (window_memory, window_tables) if kind else (memory, tables)
        pages = Pages(own[place], layers.width, page_size)
        begin, last = share_of(buffers.packed.shape[0], worker, workers)
        rotate_and_store_rows(
            buffers.packed, begin, last, layers.query_heads, step.cosine[angles], step.sine[angles],
            layers.query_norms[layer], layers.key_norms[layer], layers.epsilon, step.token_pages[kind],
            step.token_offsets, pages,
        )  # fmt: skip  # arguments in groups
        _wait(layers, layer, OUT, team)
        if layer == layers.panels.shape[0] - 1 and last_buffers.residual.shape[0] < buffers.residual.shape[0]:
            _move_wanted(step, layers.query_heads * layers.width, buffers, team)
            buffers = last_buffers
        attend_share(
            buffers.packed, buffers.attended, pages, own_tables, step.slots,
            Blocks(step.runs, step.firsts, step.bounds[cut]), layers.query_heads // own.shape[2],
            layers.scales[layer], layers.windows[layer], layers.softcaps[layer], layers.sinks[layer],
            buffers.attention, layers.codes[ATTENTION], worker,
        )  # fmt: skip  # arguments in groups
        _wait(layers, layer, OUT, team)
        _leave_branch(layers, layer, OUT, 1, buffers.attended, buffers, team)
        _enter_branch(layers, layer, 2, buffers, team)
        _multiply(layers, layer, GATE_UP, GATED, buffers.normed, buffers.inner, COLUMNS // 2, buffers, team)
        _leave_branch(layers, layer, DOWN, 3, buffers.inner, buffers, team)


_call_share = caller(lambda *given: given)


def share_code(arguments: tuple[Any, ...]) -> int:
    """Return the address of the code of a worker's share, for `run_layers` with these arguments."""
    return address_of(_run_share, (*map(typeof, arguments), types.int64))


@compiled(parallel=True, nogil=True)
def run_layers(
    code: int, layers: Any, step: Any, memory: Any, window_memory: Any, tables: Any, window_tables: Any,
    page_size: int, buffers: Any, last_buffers: Any, first: int, end: int, arrived: Any, workers: int,
) -> None:  # fmt: skip  # arguments in groups
    """Take the residual through the layers from the `first` on, before the `end`, in place.

    `memory` and its tables are those of pages, and `window_memory` those of window pages, [layers, ...] of `page_shape`
    each. `last_buffers` are the first rows of `buffers`, as many as leave the last layer. `code` is that of
    `share_code`, `arrived` what `arrivals` makes, and all `workers` must run at once.
    """
    for worker in prange(workers):
        arguments = (
            layers, step, memory, window_memory, tables, window_tables, page_size, buffers, last_buffers, first, end,
            arrived, workers, worker,
        )  # fmt: skip  # arguments in groups
        _call_share(code, arguments)
