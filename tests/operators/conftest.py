"""Real Ray for the tests of a module: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_of_two_cpus() -> Iterator[None]:
    """Ray on this machine with two CPUs."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    from tests.support.ray_jobs import start

    start(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()
