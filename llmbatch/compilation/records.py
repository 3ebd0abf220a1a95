"""Arrays of records with named fields, which compiled code and Python read alike: `table[i].field`.

A record is described once, by a class whose fields are annotated with the kinds below. Type checkers see plain
numbers, NumPy and numba a structured dtype. A single record that compiled code changes is an array of one.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar, cast, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray

Int32 = Annotated[int, np.int32]
Int64 = Annotated[int, np.int64]
Float64 = Annotated[float, np.float64]
Bool = Annotated[bool, np.bool_]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Records(Protocol[T_co]):
    """An array of records of one class; indexed by a field's name, the column of that field."""

    @overload
    def __getitem__(self, at: int, /) -> T_co: ...
    @overload
    def __getitem__(self, at: str, /) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, at: slice | NDArray[np.int32], /) -> Records[T_co]: ...
    def __setitem__(self, at: slice, value: object, /) -> None: ...
    def __len__(self) -> int: ...
    def copy(self) -> Records[T_co]:
        """Copy the records."""
        ...


def records(kind: type[T], count: int = 1) -> Records[T]:
    """Make `count` records of a class, all zeros."""
    fields = get_type_hints(kind, include_extras=True)
    layout = np.dtype([(name, hint.__metadata__[0]) for name, hint in fields.items()], align=True)
    return cast(Records[T], np.zeros(count, layout).view(np.recarray))
