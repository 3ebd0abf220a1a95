"""What the compiled loop of a decoder is given: weights and parameters, a step, and memory for what it computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

QKV, OUT, GATE_UP, DOWN = range(4)  # the products of a layer
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
    query_norms_together: NDArray[np.float32]  # [layers, elements of all heads of queries, or 0]
    key_norms_together: NDArray[np.float32]  # [layers, elements of all heads of keys, or 0]
    epsilon: float
    windows: NDArray[np.int64]  # [layers]
    scales: NDArray[np.float32]  # [layers]
    softcaps: NDArray[np.float32]  # [layers]
    sinks: NDArray[np.float32]  # [layers, query heads, or 0]
    query_heads: int
    width: int  # of a head
    codes: NDArray[np.int64]  # of tiles: `STORED`, `ADDED`, `GATED`, `WHOLE`; of `ATTENTION`


class Ends(NamedTuple):
    """What is around the layers. Where a model's own modules are, these are empty."""

    embedding: NDArray[Any]  # [vocabulary, hidden], of the type of the weights; [0, hidden]: the residual is there
    norm: NDArray[np.float32]  # [hidden]; [0]: there is no head either
    epsilon: float
    code: int  # of the head's tiles; what follows is of its packed weight
    panels: int
    panel_count: int
    words: int
    columns: int
    columns_step: int
    alone: int


class LayerStep(NamedTuple):
    """A step as layers see it."""

    ids: NDArray[np.int64]  # [tokens], or [0] where the residual is there
    cosine: NDArray[Any]  # [kinds, angles, rotated]
    sine: NDArray[Any]
    turns: NDArray[np.int64]  # [tokens] which of the angles
    angles: NDArray[np.int64]  # [layers] which of the kinds
    token_pages: NDArray[np.int32]  # [2, tokens] pages, and window pages
    token_offsets: NDArray[np.int32]
    places: NDArray[np.int64]  # [layers, 2] which of these two, and which of the layers that have the same
    slots: NDArray[np.int32]
    runs: NDArray[np.int64]  # of `Blocks` of all kinds of window, one kind after the other; so are `firsts`
    firsts: NDArray[np.int64]
    bounds: NDArray[np.int64]  # [kinds of window, workers + 1]
    cuts: NDArray[np.int64]  # [layers] which of them
    last: int  # how many rows leave the last layer
    wanted: NDArray[np.int64]  # these, which rise; not read where all do
    sampled: NDArray[np.int64]  # [samples] which of these rows the head gets


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


class Ranks(NamedTuple):
    """The processes that have a share of each layer, as one of them sees them; their blocks are used in turn."""

    processes: int
    rank: int  # of this one
    turn: int  # of the next block: 0 or 1
    arrived: NDArray[np.int64]  # the barrier of all workers of all ranks
    blocks: NDArray[np.float32]  # [2, ranks, elements of some rows] what each rank adds to the residual


class Samples(NamedTuple):
    """What comes of the head, where it is one of `Ends`."""

    normed: NDArray[Any]  # [samples, hidden] of what the head's product takes
    logits: NDArray[np.float32]  # [samples, vocabulary rounded up to panels]
