"""Rows of benchmarks/beside.py: those of some policies are run anew, and those of the others are kept."""

from __future__ import annotations

import json
import runpy
from typing import Any

from tests.support.paths import ROOT

MODULE = runpy.run_path(str(ROOT / "benchmarks" / "beside_rows.py"))
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


def runs(rows: list[dict[str, Any]]) -> list[tuple[float, str, int]]:
    return [(row["setting"]["rate"], row["setting"]["policy"], row["run"]) for row in rows]


def test_only_rows_of_the_policies_are_run_and_those_of_others_stay_in_their_places() -> None:
    earlier = json.loads(json.dumps(Rows(1).of(first, SETTINGS)))
    elsewhere = [{**setting, "online": "/tmp/two/conv.parquet"} for setting in SETTINGS]
    rows = Rows(1, ["slack"], earlier)
    assert runs(rows.of(second, elsewhere)) == [
        (0.5, "slack", 2),
        (0.5, "fcfs", 1),
        (0.8, "slack", 2),
        (0.8, "fcfs", 1),
    ]
    assert rows.missing == 0


def test_rows_that_are_neither_run_nor_there_are_counted() -> None:
    rows = Rows(1, ["slack"], [first({**SETTINGS[1], "rate": 9.0})])
    assert runs(rows.of(second, SETTINGS)) == [(0.5, "slack", 2), (0.8, "slack", 2)]
    assert rows.missing == 2
