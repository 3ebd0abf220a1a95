"""Attention in chunks is that of the pieces that a step is cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmbatch.kernels.chunks import Pieces, cut_at_chunks
from llmbatch.kernels.reference import attend

HEADS, GROUP, WIDTH = 2, 3, 8


@pytest.mark.parametrize(("chunk", "page_size"), [(8, 1), (8, 4), (8, 8), (32, 8), (512, 8)])
def test_pieces_attend_as_their_sequences_do_within_chunks(chunk: int, page_size: int) -> None:
    rng = np.random.default_rng(chunk + page_size)
    starts = np.array([0, 7, 8, 9, 33, 0], np.int32)
    counts = np.array([40, 1, 1, 15, 7, 8], np.int32)
    each = -(-int((starts + counts).max()) // page_size)
    pages = len(starts) * each
    tables = rng.permutation(pages).astype(np.int32).reshape(len(starts), each)
    slots = np.array([3, 0, 5, 1, 2, 4], np.int32)
    keys, values = (torch.from_numpy(rng.normal(size=(pages, HEADS, page_size, WIDTH))) for _ in range(2))
    query = torch.from_numpy(rng.normal(size=(int(counts.sum()), HEADS * GROUP, WIDTH)))

    def attended(step: Pieces, chunk: int) -> torch.Tensor:
        rows = torch.from_numpy(step.tables[step.slots])
        return attend(query, keys, values, rows, step.starts.tolist(), step.counts.tolist(), scale=0.5, chunk=chunk)

    step = Pieces(tables, slots, starts, counts)
    pieces = cut_at_chunks(step, chunk, page_size)
    assert (pieces.starts + pieces.counts <= chunk).all()
    assert pieces.tables.shape[1] <= max(1, chunk // page_size)
    torch.testing.assert_close(attended(pieces, 0), attended(step, chunk))
