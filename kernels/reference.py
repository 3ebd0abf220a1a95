"""The reference of attention over pages, computed plainly in float64: every backend is compared with it."""

from __future__ import annotations

import math

import torch


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: list[int],
    counts: list[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    chunk: int = 0,
) -> torch.Tensor:
    """Attend `query` over pages in float64: [tokens, query heads, width], of the same shape as `query`.

    Sequence i computes tokens [starts[i], starts[i] + counts[i]) and reads pages `tables[i]` of `keys` and `values`
    [pages, heads, page size, width]. A `window`, `softcap` or `chunk` of 0 means none.
    """
    heads = keys.shape[1]
    group = query.shape[1] // heads
    outs = []
    row = 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        end = start + count
        pages = table[: -(-end // keys.shape[2])].long()
        # As bytes, since not every torch can take rows of e4m3.
        taken = (x.view(torch.uint8)[pages].view(x.dtype) for x in (keys, values))
        key, value = (x.double().transpose(1, 2).flatten(0, 1)[:end] for x in taken)
        q = query[row : row + count].double().view(count, heads, group, -1)
        scores = torch.einsum("thgd,khd->hgtk", q, key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(start, end, device=query.device)[:, None]
        at = torch.arange(end, device=query.device)[None]
        seen = at <= position
        if window:
            seen &= at > position - window
        if chunk:
            seen &= at >= position - position % chunk
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            sink = sinks.double().view(heads, group, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., :end]
        outs.append(torch.einsum("hgtk,khd->thgd", weights, value).flatten(1, 2))
        row += count
    return torch.cat(outs)
