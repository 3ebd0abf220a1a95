"""Relations of DuckDB: answered ones belong to the connection of those that were asked."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from llmbatch.errors import DataError

_LOST = ("BIT", "TIME WITH TIME ZONE")  # types of which Arrow does not keep the whole value


def beside_relation(relation: Any, answered: pa.Table) -> Any:
    """Make a relation of an answered table, in which the columns of the relation it came from have their types.

    Raises `DataError` where Arrow does not keep a type's values.
    """
    rows = relation.query("asked", "select * from answered")
    items = []
    for name, asked, given in zip(relation.columns, relation.types, rows.types):
        quoted = '"' + name.replace('"', '""') + '"'
        if str(asked) == str(given):
            items.append(quoted)
            continue
        if any(lost in str(asked) for lost in _LOST):
            raise DataError(
                f"a relation's columns must be of types that Arrow keeps, got {name!r} of {asked}: "
                "cast it in the query, or set arrow_lossless_conversion"
            )
        items.append(f"{quoted}::{asked} as {quoted}")
    items += ['"' + name.replace('"', '""') + '"' for name in rows.columns[len(relation.columns) :]]
    return rows.project(", ".join(items))
