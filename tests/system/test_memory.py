"""What memory a process may take: what is free, and no more than it was told."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator

import pytest

from llmbatch.system.memory import available_memory, take_at_most


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    yield
    take_at_most(math.inf)


def test_a_process_takes_no_more_than_it_was_told() -> None:
    free = available_memory()
    take_at_most(1 << 60)
    assert available_memory() > 0.5 * free
    take_at_most(1 << 33)
    assert 0 < available_memory() < 1 << 33


def test_a_process_that_has_more_than_it_was_told_takes_nothing() -> None:
    take_at_most(1 << 20)
    assert available_memory() == 0


def test_addresses_that_a_process_may_have_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert available_memory() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 60, 1 << 60))
    assert available_memory() > 0
