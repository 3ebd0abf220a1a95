"""`Template`: text with column names in braces, filled row by row."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from llmbatch.columns import is_text, nested_values, text_values
from llmbatch.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Template:
    """Text taken apart: `literals[0]`, column `names[0]`, `literals[1]`, and so on to the last literal."""

    literals: tuple[str, ...]  # one more than `names`
    names: tuple[str, ...]  # at least one; a name may occur again

    @classmethod
    def parse(cls, text: str) -> Template:
        """Take a template apart; `{{` and `}}` are braces, a name may hold spaces and dots.

        Raises `ParameterError` for unbalanced braces, for conversions, format specifications and index
        access, and when no column is named.
        """
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ParameterError(
                f"a template needs balanced braces, got {text!r} ({error}): write {{{{ and }}}} for braces"
            ) from None
        literals, names = [""], []
        for literal, name, form, conversion in parsed:
            literals[-1] += literal
            if name is None:
                continue
            if not name or form or conversion or "[" in name:
                written = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                raise ParameterError(
                    f"a template holds plain column names in braces, got '{{{written}}}': "
                    "write {{ and }} for braces"
                )
            names.append(name)
            literals.append("")
        if not names:
            raise ParameterError(f"a template must name at least one column in braces, got {text!r}")
        return cls(tuple(literals), tuple(names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are named, each once."""
        return tuple(dict.fromkeys(self.names))

    def fill(self, table: pa.Table) -> Iterator[tuple[str | None, str | None]]:
        """The text of each row and None, or None and the first column that is null in it.

        Values are written as `str` writes them; timestamps to the microsecond, which is what Python has.
        """
        texts = {name: list(_texts(table[name], name)) for name in self.columns}
        for values in zip(*(texts[name] for name in self.names), strict=True):
            if None in values:
                yield None, self.names[values.index(None)]
            else:
                yield "".join(map("".join, zip(self.literals, (*values, ""), strict=True))), None


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a template can write values of this type: text, numbers, booleans and times."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        is_text,
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_temporal,
    )
    return any(test(kind) for test in tests)


def _texts(column: pa.ChunkedArray, name: str) -> Iterator[str | None]:
    kind = column.type
    if is_text(kind):
        yield from text_values(column, name)
        return
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    for value in nested_values(column):
        yield None if value is None else str(value)
