"""How many examples a costly property is tried on: a third in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from hypothesis import settings

ALL = "all"  # the profile of `make test-all`
_SHARE = 3


def examples(count: int) -> settings:
    """Settings of a property that is tried on so many examples in `make test-all`."""
    every = settings.get_current_profile_name() == ALL
    return settings(max_examples=count if every else -(-count // _SHARE), deadline=None)
