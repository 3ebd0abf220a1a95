"""Rows of benchmarks/clock/beside.py: some policies' are run anew, the others' are kept, and a stopped run goes on."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

MODULE = runpy.run_path(str(ROOT / "benchmarks" / "clock" / "harness" / "beside_rows.py"))
Rows, named = MODULE["Rows"], MODULE["named"]
SETTINGS: list[dict[str, Any]] = [
    {
        "named": f"row {rate}",
        "online": "/tmp/one/conv.parquet",
        "offline": ["/a/code.parquet"],
        "policy": policy,
        "rate": rate,
    }
    for rate in (0.5, 0.8)
    for policy in ("slack", "fcfs")
]


def first(setting: dict[str, Any]) -> dict[str, Any]:
    return {"setting": named(setting), "run": 1}


def second(setting: dict[str, Any]) -> dict[str, Any]:
    return {"setting": named(setting), "run": 2}


def failing(setting: dict[str, Any]) -> dict[str, Any]:
    if setting["rate"] > 0.5:
        raise RuntimeError("stopped")
    return first(setting)


def runs(rows: list[dict[str, Any]]) -> list[tuple[float, str, int]]:
    return [(row["setting"]["rate"], row["setting"]["policy"], row["run"]) for row in rows]


def test_only_rows_of_the_policies_are_run_and_those_of_others_stay_in_their_places(tmp_path: Path) -> None:
    before = Rows(1, tmp_path / "before")
    earlier = json.loads(json.dumps(before.of(first, SETTINGS)))
    elsewhere = [{**setting, "online": "/tmp/two/conv.parquet"} for setting in SETTINGS]
    rows = Rows(1, tmp_path / "stopped", ["slack"], earlier)
    assert runs(rows.of(second, elsewhere)) == [
        (0.5, "slack", 2),
        (0.5, "fcfs", 1),
        (0.8, "slack", 2),
        (0.8, "fcfs", 1),
    ]
    assert rows.missing == 0


def test_rows_that_are_neither_run_nor_there_are_counted(tmp_path: Path) -> None:
    rows = Rows(1, tmp_path / "stopped", ["slack"], [first({**SETTINGS[1], "rate": 9.0})])
    assert runs(rows.of(second, SETTINGS)) == [(0.5, "slack", 2), (0.8, "slack", 2)]
    assert rows.missing == 2


def test_a_run_that_was_stopped_goes_on_with_the_rows_that_are_not_there_yet(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    with pytest.raises(RuntimeError, match="stopped"):
        Rows(1, stopped).of(failing, SETTINGS)
    rows = Rows(1, stopped)
    assert [run for _, _, run in runs(rows.of(second, SETTINGS))] == [1, 1, 2, 2]
    rows.end()
    assert not stopped.exists()
    assert [run for _, _, run in runs(Rows(1, stopped).of(second, SETTINGS))] == [2, 2, 2, 2]


def test_a_row_that_a_kill_has_cut_is_run_again(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    Rows(1, stopped).of(first, SETTINGS)
    text = stopped.read_text()
    for size in (len(text) - 1, len(text) - 20):
        stopped.write_text(text[:size])
        assert [run for _, _, run in runs(Rows(1, stopped).of(second, SETTINGS))] == [1, 1, 1, 2]
