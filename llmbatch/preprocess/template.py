"""`Template`: text with column names in braces, filled row by row."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from llmbatch.errors import ParameterError, RowError
from llmbatch.preprocess.columns import Unreadable, is_text, nested_values, text_values
from llmbatch.preprocess.tokenization.control_tokens import Controls, Spans

_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}  # their numbers have fewer digits than Python's


class Filled(NamedTuple):
    """A template with the values of a row."""

    text: str
    values: tuple[str, ...]  # a value for each name


@dataclass(frozen=True, slots=True)
class Template:
    """Text split at its columns: `literals[0]`, column `names[0]`, `literals[1]`, and so on to the last literal."""

    literals: tuple[str, ...]  # one more than `names`
    names: tuple[str, ...]  # at least one; a name may occur again

    @classmethod
    def parse(cls, text: str) -> Template:
        """Split a template; `{{` and `}}` are braces, a name may hold spaces and dots.

        Raises `ParameterError` for unbalanced braces, for conversions, format specifications and index access, and if
        no column is named.
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

    def fill(self, table: pa.Table) -> Iterator[Filled | RowError]:
        """Fill in the text of each row; a null value, or one that cannot be written, is an error.

        Values are written as `str` writes them; times to the microsecond, which is what Python has, and numbers of
        float32 and float16 with the digits that these have: 0.1, not 0.10000000149011612.
        """
        columns = {name: list(_texts(table[name])) for name in self.columns}
        for row in zip(*(columns[name] for name in self.names), strict=True):
            values = tuple(value for value in row if isinstance(value, str))
            if len(values) == len(row):
                yield Filled("".join(map("".join, zip(self.literals, (*values, ""), strict=True))), values)
            else:
                yield next(_error(name, value) for name, value in zip(self.names, row) if not isinstance(value, str))

    def written(self, values: tuple[str, ...], controls: Controls) -> Spans:
        """Find where the text of a row has the control tokens of the template itself."""
        sizes = (len(literal) + len(value) for literal, value in zip(self.literals, values))
        spans: list[tuple[int, int]] = []
        for literal, start in zip(self.literals, accumulate(sizes, initial=0), strict=True):
            spans += ((start + begin, start + end) for begin, end in controls.spans(literal))
        return tuple(spans)


def is_scalar(kind: pa.DataType) -> bool:
    """Tell whether a template can write values of this type: text, numbers, booleans and times."""
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


def _texts(column: pa.ChunkedArray) -> Iterator[str | Unreadable | None]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False) if kind.unit == "ns" else column
    elif pa.types.is_duration(kind) or pa.types.is_time64(kind):
        kind = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
        column = column.cast(kind, safe=False) if column.type.unit == "ns" else column
    number = kind.value_type if pa.types.is_dictionary(kind) else kind
    narrow = _NARROW.get(number, float)
    for value in text_values(column) if is_text(kind) else nested_values(column):
        if isinstance(value, float):
            value = narrow(value)
        yield value if value is None or isinstance(value, Unreadable) else str(value)


def _error(name: str, value: Unreadable | None) -> RowError:
    if value is None:
        return RowError("template", f"template needs column {name!r}, which is null in this row")
    return RowError("template", f"template needs column {name!r}, which cannot be written in this row: {value.reason}")
