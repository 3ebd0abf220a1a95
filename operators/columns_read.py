"""Which columns of a table the model reads, and which it adds.

Other columns are never brought to Arrow: they may hold what Arrow cannot.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from llmbatch.inference.options import Options
from llmbatch.operators.workers import LockedWorker


def columns_read(options: Options) -> list[str]:
    """Name the columns that prompts and their parameters are made of, each once."""
    names = (*options.source.columns(), options.sampling_column, options.output_tokens, options.continuation)
    return list(dict.fromkeys(name for name in names if name is not None))


def outline(names: Iterable[str], known: pa.Schema) -> pa.Schema:
    """Make the schema of a table of which only the columns that are read have a type that is known."""
    return pa.schema([known.field(name) if name in known.names else pa.field(name, pa.null()) for name in names])


def answer_schema(shared: LockedWorker, schema: pa.Schema) -> pa.Schema:
    """Return the columns that answers to tables of a schema have. Raises InputError where there can be none."""
    shared.worker.check(schema)
    return shared.worker.answer_schema(schema).columns
