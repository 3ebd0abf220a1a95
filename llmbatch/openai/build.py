"""Requests of a batch's lines, as `llmbatch.preprocess.build_requests` makes them of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pyarrow as pa

from llmbatch.errors import RowError
from llmbatch.openai.requests import SAMPLING, read_requests
from llmbatch.preprocess.request_batch import RowRequests

_NAMED: Final = 3  # models in a note


def build_batch(
    table: pa.Table, build: Callable[..., RowRequests], *, model: str, refused: Mapping[int, RowError] | None = None
) -> RowRequests:
    """Build the requests of lines by `build`, which is `build_shard` without its table, prompts and their sampling.

    `model` is the one that answers, whichever a line names: a note says so. `refused` rows already have errors.
    """
    asked = read_requests(table, refused)
    shard = build(asked.table, asked.prompts, sampling_column=SAMPLING, refused=asked.errors)
    others = [name for name in asked.models if name != model]
    if not others:
        return shard
    named = ", ".join(map(repr, others[:_NAMED])) + (", ..." if len(others) > _NAMED else "")
    return replace(shard, notes=(*shard.notes, f"lines ask for {named}: {model} answers them"))
