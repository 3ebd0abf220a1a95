"""Relations of DuckDB: answered ones belong to the connection of those that were asked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, Final

import pyarrow as pa

from llmbatch.errors import DataError

_LOST = ("BIT", "TIME WITH TIME ZONE")  # types of which Arrow does not keep the whole value
_BETWEEN: Final = 32 << 20  # bytes read between two times that freed memory is given back


def beside_relation(relation: Any, answered: pa.Table) -> Any:
    """Make a relation of an answered table, in which the columns of the relation it came from have their types.

    Raises `DataError` where Arrow does not keep a type's values.
    """
    rows = relation.query("asked", "select * from answered")
    items = []
    # `rows` has another name where two differ in nothing, or in case alone, as columns of joins do.
    for name, asked, own, given in zip(relation.columns, relation.types, rows.columns, rows.types):
        if str(asked) == str(given):
            items.append(f"{_quoted(own)} as {_quoted(name)}")
            continue
        if any(lost in str(asked) for lost in _LOST):
            raise DataError(
                f"a relation's columns must be of types that Arrow keeps, got {name!r} of {asked}: "
                "cast it in the query, or set arrow_lossless_conversion"
            )
        items.append(f"{_quoted(own)}::{asked} as {_quoted(name)}")
    items += map(_quoted, rows.columns[len(relation.columns) :])
    return rows.project(", ".join(items))


def giving_back(batches: Generator[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
    """Yield what is read of a relation, and have DuckDB give back memory that it has freed meanwhile.

    Its allocator keeps freed pages for a second or longer: some 200 MB of them where rows are of 4 KB, which no limit
    of DuckDB counts. It is one for all databases of a process, and gives all of them back when a limit is set, here
    that of an empty database.
    """
    import duckdb

    read = 0
    with closing(batches), duckdb.connect(config={"threads": 1}) as empty:
        for batch in batches:
            read += batch.nbytes
            yield batch
            if read >= _BETWEEN:
                del batch
                empty.execute("set memory_limit = '64MB'")
                read = 0


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
