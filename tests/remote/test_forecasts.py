"""When a job would end at endpoints: their own forecasts, less what guests take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.remote.windows.forecasts import beside_guests, joined, share_of_guests

PAGE = """# HELP llmbatch:guest_time_share The share of the last hour that the work of requests took, 0 to 1.
# TYPE llmbatch:guest_time_share gauge
llmbatch:guest_time_share{model_name="m"} 0.25
"""


def figures(seconds: float | None = 10.0) -> dict[str, Any]:
    return {
        "input_tokens": 800,
        "output_tokens": 600.0,
        "prefix_sharing_optimal": 0.5,
        "seconds": seconds,
        "seconds_least": 5.0,
        "seconds_most": 20.0,
        "input_order_seconds": None,
        "notes": ["a note"],
    }


def test_an_endpoint_says_what_its_guests_took_in_the_last_hour() -> None:
    assert share_of_guests(PAGE) == 0.25
    assert share_of_guests(PAGE.replace("0.25", "8.5e-05")) == 8.5e-05


@pytest.mark.parametrize("page", ["", PAGE.replace("0.25", "NaN")])
def test_an_endpoint_that_does_not_tell_is_taken_to_be_idle(page: str) -> None:
    assert share_of_guests(page) == 0.0


def test_what_guests_need_comes_off() -> None:
    found = beside_guests(figures(), 0.25)
    names = ("seconds", "seconds_least", "seconds_most", "input_order_seconds")
    assert [found[name] for name in names] == [
        pytest.approx(10 / 0.75),
        pytest.approx(5 / 0.75),
        pytest.approx(20 / 0.75),
        None,
    ]
    assert found["notes"] == [
        "guests are taken to need 25% of the endpoint, as they have in the last hour or since it began",
        "a note",
    ]


@given(st.floats(0, 1))
def test_something_is_always_left_and_guests_never_help(share: float) -> None:
    assert 10.0 <= beside_guests(figures(), share)["seconds"] <= 10.0 / 0.05 + 1e-6


def test_endpoints_share_rows_by_how_fast_they_are() -> None:
    found = joined([figures(10.0), figures(40.0)])
    assert (found["seconds"], found["seconds_least"]) == (8.0, 4.0)
    assert found["notes"] == ["2 endpoints share the rows", "a note"]


def test_one_endpoint_has_the_forecast_that_it_makes() -> None:
    assert joined([figures()]) == figures()
