"""Mixes of three traces: the compute density and the prefix sharing that are wanted, by name or by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmbatch.errors import ParameterError
from llmbatch.simulation.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """A made-up prefix-sharing source: the rows of a group share their first tokens. Lengths in tokens."""

    groups: int
    rows: int  # a group
    shared: int
    own: int
    output: int

    def trace(self) -> Trace:
        """Make all rows, group after group."""
        count = self.groups * self.rows
        return Trace(
            ("groups",),
            np.zeros(count, np.int32),
            np.full(count, self.shared + self.own, np.int32),
            np.full(count, self.output, np.int32),
            np.repeat(np.arange(self.groups, dtype=np.int32), self.rows),
            np.arange(count + 1),
            self.shared,
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """The targets of a mix; `groups`, if given, replace the prefix-sharing trace."""

    density: float
    sharing: float
    groups: PrefixGroups | None = None

    def __post_init__(self) -> None:
        if not (0 < self.density < np.inf and 0 <= self.sharing < 1):
            raise ParameterError(
                "density of a mix must be positive and its sharing in [0, 1), got "
                f"{self.density:g} and {self.sharing:g}"
            )


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        # The paper's table 2.
        "table2-1": Mix(1.4, 0.35),
        "table2-2": Mix(0.9, 0.35),
        "table2-3": Mix(1.4, 0.05),
        "table2-4": Mix(0.9, 0.05),
        # The prefixes of all groups fill the pool of an A100-80GB ten times over.
        "wide-1": Mix(1.4, 0.35, PrefixGroups(groups=5000, rows=20, shared=1000, own=100, output=2)),
    }
)


def parse_mix(text: str) -> Mix:
    """Parse the name of a mix (see `MIXES`), or "DENSITY,SHARING". Raises `ParameterError` for anything else.

    >>> parse_mix("1.4,.35") == parse_mix("table2-1")
    True
    """
    if (found := MIXES.get(text.lower())) is not None:
        return found
    try:
        density, sharing = (float(number) for number in text.split(","))
    except ValueError:
        raise ParameterError(
            f"a mix must be one of {', '.join(MIXES)} or two numbers DENSITY,SHARING (such as 1.4,0.35), got {text!r}"
        ) from None
    return Mix(density, sharing)
