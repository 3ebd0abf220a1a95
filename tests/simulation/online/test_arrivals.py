"""When requests arrive, and how long they are where no trace says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.errors import DataError, ParameterError
from llmbatch.simulation.online.arrivals import drawn, read_arrivals, scaled, uniform
from llmbatch.simulation.online.experiment import simulate_online
from llmbatch.simulation.online.lengths import drawn_trace

TIMES = np.array([0.0, 1.0, 1.0, 5.0, 9.0])


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_a_trace_at_its_own_rate_keeps_its_requests_and_their_times() -> None:
    rows, times = scaled(TIMES, 1.0, rng())
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert times.tolist() == TIMES.tolist()


def test_below_its_own_rate_requests_are_dropped_and_the_others_keep_their_times() -> None:
    many = np.sort(rng().uniform(0, 100, 10_000))
    rows, times = scaled(many, 0.3, rng())
    assert len(rows) == pytest.approx(3000, rel=0.05)
    assert (times == many[rows]).all()


def test_above_its_own_rate_copies_arrive_between_a_request_and_the_next() -> None:
    many = np.sort(rng().uniform(0, 100, 10_000))
    rows, times = scaled(many, 2.5, rng())
    assert len(rows) == pytest.approx(25_000, rel=0.02)
    assert (np.diff(times) >= 0).all()
    following = np.append(many[1:], many[-1])
    assert ((many[rows] <= times) & (times <= following[rows])).all()
    assert set(many) <= set(times)


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_drawn_arrivals_have_the_rate_and_the_variation_that_is_asked_for(variation: float) -> None:
    times = drawn(20.0, 5000.0, rng(), variation=variation)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(100_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times[-1] < 5000.0


def test_uniform_arrivals_have_equal_distances() -> None:
    assert uniform(4.0, 3).tolist() == [0.0, 0.25, 0.5]


def test_drawn_lengths_have_the_mean_and_deviation_that_are_asked_for() -> None:
    trace = drawn_trace("bros-sharegpt", 200_000, rng())
    assert trace.prompt_lengths.mean() == pytest.approx(222.8, rel=0.02)
    assert trace.output_lengths.mean() == pytest.approx(234.5, rel=0.02)
    assert trace.prompt_lengths.std() == pytest.approx(256.4, rel=0.05)
    best_effort = drawn_trace("bros-be", 100_000, rng()).prompt_lengths
    assert (best_effort.min(), best_effort.max()) == (512, 1024)


@pytest.mark.parametrize("name", ["lognormal:5", "lognormal:0,5", "uniform:9-3,1-2", "uniform:1,2", "uniform:a-b,1-2"])
def test_a_distribution_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=r"^a distribution must be lognormal:"):
        drawn_trace(name, 5, rng())


def test_a_trace_without_times_is_refused_where_its_times_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt_tokens": [5], "output_tokens": [5]}), path)
    with pytest.raises(DataError, match="must have arrival_s"):
        read_arrivals(path)
    pq.write_table(pa.table({"arrival_s": [1.0, -2.0]}), path)
    with pytest.raises(DataError, match=r"row 1 of .* has -2"):
        read_arrivals(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": "poisson"}, r"per_second must be given for arrivals poisson \(--per-second Q\)"),
        ({"arrivals": "gamma", "per_second": 2.0}, r"duration must be given for arrivals gamma \(--duration S\)"),
        ({"per_second": 2.0}, r"per_second must be left out for arrivals trace, .*, got 2\.0"),
        (
            {"arrivals": "poisson", "per_second": 2.0, "duration": 1.0, "burstiness": 3.0},
            r"burstiness must be left out without arrivals gamma \(--arrivals gamma\), got 3\.0",
        ),
        ({"policy": "best"}, "policy must be one of fcfs, round-robin, priority, bros, ooco, slack"),
        ({"ttft": 0.0}, "ttft must be above 0"),
        ({"pools": "strict=1,relaxed=1"}, "pools must be strict=1,relaxed=1, for policy ooco"),
        ({"policy": "ooco", "pools": "strict=2"}, "pools must be strict=1,relaxed=1, for policy ooco"),
        ({"polcy": "bros"}, "did you mean policy"),
        (
            {"offline": ["bros-be"], "arrivals": "poisson", "per_second": 1.0, "duration": 1.0},
            "must stand alone and have requests",
        ),
        ({}, "must be poisson or gamma for bros-sharegpt"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        simulate_online("bros-sharegpt", **options)  # type: ignore[arg-type]
