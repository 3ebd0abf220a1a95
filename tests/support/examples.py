"""How many examples and seeds a costly property is tried on: some in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

ALL = "all"  # the profile of `make test-all`
_SHARE = 3


def examples(count: int) -> settings:
    """Settings of a property that is tried on so many examples in `make test-all`."""
    every = settings.get_current_profile_name() == ALL
    return settings(max_examples=count if every else -(-count // _SHARE), deadline=None)


def seeds(some: int, every: int) -> list[Any]:
    """Seeds from 0 to `every`, as parameters of a test; those from `some` on are for `make test-all`."""
    return [*range(some), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(some, every))]
