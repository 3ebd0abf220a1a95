"""When a job would end at endpoints: their own forecasts, less what guests take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.remote.windows.forecasts import beside_guests, joined, tokens_each_second

PAGE = """# TYPE llmbatch:prompt_tokens_total counter
llmbatch:prompt_tokens_total{model_name="m"} 900.0
# TYPE llmbatch:prompt_tokens_created gauge
llmbatch:prompt_tokens_created{model_name="m"} 1735689600.5
llmbatch:generation_tokens_total{model_name="m"} 100.0
llmbatch:generation_tokens_created{model_name="m"} 1735689600.0
"""
LATER = {"date": "Wed, 01 Jan 2025 00:01:40 GMT"}  # by 100 s


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


def test_the_tokens_of_guests_are_counted_from_the_start_of_the_endpoint() -> None:
    assert tokens_each_second(PAGE, LATER) == pytest.approx(10.0)


@pytest.mark.parametrize(("page", "headers"), [("", LATER), (PAGE, {}), (PAGE, {"date": "soon"})])
def test_an_endpoint_that_does_not_tell_is_taken_to_be_idle(page: str, headers: dict[str, str]) -> None:
    assert tokens_each_second(page, headers) == 0.0


def test_what_guests_need_comes_off() -> None:
    found = beside_guests(figures(), 25.0)  # of 100 tokens a second that the job computes alone
    names = ("seconds", "seconds_least", "seconds_most", "input_order_seconds")
    assert [found[name] for name in names] == [
        pytest.approx(10 / 0.75),
        pytest.approx(5 / 0.75),
        pytest.approx(20 / 0.75),
        None,
    ]
    assert found["notes"] == ["guests are taken to need 25% of the endpoint, as they have since it began", "a note"]


@given(st.floats(0, 1e9))
def test_something_is_always_left_and_guests_never_help(rate: float) -> None:
    assert 10.0 <= beside_guests(figures(), rate)["seconds"] <= 10.0 / 0.05 + 1e-6


def test_endpoints_share_rows_by_how_fast_they_are() -> None:
    found = joined([figures(10.0), figures(40.0)])
    assert (found["seconds"], found["seconds_least"]) == (8.0, 4.0)
    assert found["notes"] == ["2 endpoints share the rows", "a note"]


def test_one_endpoint_has_the_forecast_that_it_makes() -> None:
    assert joined([figures()]) == figures()
