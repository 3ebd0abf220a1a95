"""A step cut into steps that are computed at the same time.

A part must not read what another part has not written yet. Decodes write pages of their own. A prefill may read pages
of prefills before it in the step, never of later ones (`llmbatch.scheduler.admission`). So parts whose layers write in
their order may be cut anywhere in the order of the step (`halves`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmbatch.scheduler.output import Step


class MicroBatch(NamedTuple):
    """A step that is part of another step."""

    step: Step
    rows: NDArray[np.intp]  # of the whole step, that its sequences are


def whole(step: Step) -> tuple[MicroBatch]:
    """Keep the step as one part."""
    return (MicroBatch(step, np.arange(len(step.slots))),)


def halves(step: Step) -> tuple[MicroBatch, MicroBatch]:
    """Split into two parts with half of the tokens each, and half of the keys that decodes read; a chunk may be cut.

    The step has at least two tokens, and each half one.
    """
    decodes, tokens = step.num_decodes, step.num_tokens
    read = np.cumsum(step.starts[:decodes] + 1, dtype=np.int64)
    first = min(int(np.searchsorted(read, read[-1] / 2)) + 1, max(1, decodes - 1)) if decodes else 0
    ends = decodes + np.cumsum(step.counts[decodes:], dtype=np.int64)
    middle = np.clip(tokens // 2 - first + decodes, decodes, tokens)  # as if the first half had all decodes
    cut = decodes + int(np.searchsorted(ends, middle, side="right"))  # the chunk that lies across it, if any does
    rows = np.arange(len(step.slots))
    before, after = rows[decodes:cut], rows[cut:]
    over = int(middle - (ends[cut - decodes - 1] if cut > decodes else decodes))  # tokens of it before the middle
    one = _part(step, np.concatenate((rows[:first], before, after[: over > 0])))
    other = _part(step, np.concatenate((rows[first:decodes], after)))
    if over > 0:
        one.step.counts[-1], one.step.samples[-1] = over, False
        other.step.starts[decodes - first] += over
        other.step.counts[decodes - first] -= over
    return one, other


def order_of(parts: tuple[MicroBatch, ...]) -> NDArray[np.intp]:
    """Index the parts' samples, one part after the other, by the order of the whole step."""
    return np.argsort(np.concatenate([part.rows[part.step.samples] for part in parts]))


def _part(step: Step, rows: NDArray[np.intp]) -> MicroBatch:
    taken = replace(
        step,
        num_decodes=int(np.searchsorted(rows, step.num_decodes)),
        slots=step.slots[rows],
        requests=step.requests[rows],
        starts=step.starts[rows],
        counts=step.counts[rows],
        samples=step.samples[rows],
    )
    return MicroBatch(taken, rows)
