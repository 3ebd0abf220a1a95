"""What `llmbatch simulate --online` prints can be computed again from what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmbatch.cli.main import main
from llmbatch.errors import ParameterError
from llmbatch.simulation.online.experiment import OnlineExperiment, simulate_online
from llmbatch.simulation.online.options import OnlinePolicy

DURATIONS = [None, 4.0]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Thirty online requests in six seconds."""
    rng = np.random.default_rng(0)
    columns = {
        "prompt_tokens": pa.array(rng.integers(20, 900, 30), pa.int32()),
        "output_tokens": pa.array(rng.integers(1, 40, 30), pa.int32()),
        "arrival_s": np.sort(rng.uniform(0, 6, 30)),
    }
    path = tmp_path / "chat.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def figures(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[Any, Any, Any]:
    """Run the command: its figures, its steps and its requests."""
    steps, requests = tmp_path / "steps.parquet", tmp_path / "requests.parquet"
    words = ["simulate", "--online", trace, "--offline", "uniform:100-900,5-60", "--requests", "60", *more]
    assert main([*words, "--json", "--steps-out", str(steps), "--requests-out", str(requests)]) == 0
    return json.loads(capsys.readouterr().out), pq.read_table(steps), pq.read_table(requests).to_pylist()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "bros", "ooco", "slack"])
@pytest.mark.parametrize("duration", DURATIONS)
def test_every_figure_follows_from_the_two_tables(
    policy: str, duration: float | None, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if duration is None else ["--duration", str(duration)]
    words = ["--policy", policy, "--ttft", ".1", "--tpot", ".03", "--lengths", "known", *more]
    report, steps, requests = figures(trace, tmp_path, capsys, *words)
    online = [row for row in requests if row["kind"] == "online"]
    waits = [row["first_token_s"] - row["arrival_s"] for row in online]
    gaps = [gap for row in online for gap in row["gaps_s"]]
    figure = report["online"]
    assert figure["requests"] == len(online)
    assert len(online) > (29 if duration is None else 0)
    for name, values, percent in [
        ("ttft_p50", waits, 50), ("ttft_p99", waits, 99), ("ttft_max", waits, 100), ("gap_p50", gaps, 50),
        ("gap_p99", gaps, 99), ("gap_p999", gaps, 99.9), ("gap_max", gaps, 100),
    ]:  # fmt: skip  # a table
        assert figure[name] == pytest.approx(np.percentile(values, percent)), name
    per_token = [(row["last_token_s"] - row["arrival_s"]) / row["output_tokens"] for row in online]
    assert figure["normalised_latency"] == pytest.approx(np.mean(per_token))
    in_time = [wait <= 0.1 for wait in waits]
    steady = [sum(row["gaps_s"]) / max(1, len(row["gaps_s"])) <= 0.03 for row in online]
    assert figure["ttft_attainment"] == pytest.approx(np.mean(in_time))
    assert figure["tpot_attainment"] == pytest.approx(np.mean(steady))
    assert figure["both_attainment"] == pytest.approx(np.mean(np.logical_and(in_time, steady)))
    for row in online:
        assert len(row["gaps_s"]) == row["output_tokens"] - 1
        assert row["first_token_s"] + sum(row["gaps_s"]) == pytest.approx(row["last_token_s"])

    until = np.inf if duration is None else duration
    job, rows = report["job"], [row for row in requests if row["kind"] == "offline"]
    ended = [r for r in rows if r["generated_tokens"] == r["output_tokens"] and r["last_token_s"] <= until]
    assert (job["rows"], job["rows_ended"]) == (len(rows), len(ended))
    assert job["tokens_ended"] == sum(row["prompt_tokens"] + row["output_tokens"] for row in ended)
    log = [step for step in steps.to_pylist() if step["begin_s"] + step["time_s"] <= until]
    tokens = sum(step["prefill_tokens"] + step["decode_tokens"] - step["online_tokens"] for step in log)
    again = sum(step["recomputed_tokens"] - step["online_recomputed_tokens"] for step in log)
    assert (job["tokens_computed"], job["tokens_again"]) == (tokens - again, again)
    if duration is None:
        assert job["rows_ended"] == 60
        assert job["seconds"] == pytest.approx(max(row["last_token_s"] for row in rows))
        needed = sum(r["prompt_tokens"] - r["found_tokens"] + r["output_tokens"] - 1 for r in rows)
        assert job["tokens_computed"] == needed
    assert report["preemptions"] == sum(steps["preempted"].to_pylist())


def test_steps_follow_one_another_and_stand_still_only_until_somebody_arrives(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, steps, requests = figures(trace, tmp_path, capsys, "--policy", "priority")
    begin, time = steps["begin_s"].to_numpy(), steps["time_s"].to_numpy()
    idle = begin[1:] - (begin + time)[:-1]
    assert (idle > -1e-9).all()
    arrivals = np.array([row["arrival_s"] for row in requests])
    assert np.isin(begin[1:][idle > 1e-9], arrivals).all()


@pytest.mark.parametrize("policy", ["priority", "bros", "ooco", "slack"])
def test_who_keeps_to_the_target_does_no_more_than_the_bound(policy: OnlinePolicy, trace: str) -> None:
    report = OnlineExperiment(
        online=trace, offline=["uniform:100-900,5-60"], requests=400, policy=policy, tpot=5.0, lengths="known"
    ).run().report  # fmt: skip  # a chain
    assert report.bound_seconds is not None
    assert report.bound_seconds <= report.job.seconds


def test_without_a_job_there_is_no_bound_and_online_requests_run_alone(trace: str) -> None:
    report = simulate_online(trace, policy="fcfs")
    assert (report.bound_seconds, report.bound_share, report.job.rows) == (None, None, 0)
    assert report.online.requests == 30


@pytest.mark.parametrize(
    ("name", "value"), [("mix", "table2-1"), ("requests", 5), ("offline_rate", 2.0), ("outstanding", 3)]
)
def test_what_is_said_of_a_job_needs_one(trace: str, name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as raised:
        simulate_online(trace, **{name: value})
    assert str(raised.value) == f"{name} must come with a job, which it is of (--offline), got {value!r}"


@pytest.mark.parametrize(("name", "value"), [("offline_rate", 2.0), ("outstanding", 3)])
def test_slack_has_all_rows_of_a_job_at_once(trace: str, name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as raised:
        simulate_online(trace, offline=[trace], policy="slack", **{name: value})
    assert str(raised.value) == f"{name} must be left out for policy slack, which has all rows at once, got {value!r}"


def test_what_can_never_fit_is_counted_and_left_out(trace: str) -> None:
    report = simulate_online(trace, kv_memory=500 * 131_072.0)
    assert report.refused > 0
    assert report.online.requests == 30 - report.refused
