"""How many requests an endpoint has at once: a rule without a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbatch.remote.concurrency import Concurrency, FirstTokens, next_limit

LIMITS = st.integers(1, 10_000)
SECONDS = st.floats(0, 1e6)


@given(LIMITS, LIMITS, LIMITS, st.none() | SECONDS, st.none() | SECONDS)
def test_the_next_limit_lies_between_start_and_most(
    limit: int, start: int, most: int, seconds: float | None, bound: float | None
) -> None:
    found = next_limit(max(limit, start), start=start, most=most, seconds=seconds, bound=bound)
    assert min(start, most) <= found <= most


@given(LIMITS, LIMITS, SECONDS, SECONDS)
def test_it_doubles_exactly_while_what_guests_wait_is_within_the_bound(
    limit: int, start: int, seconds: float, bound: float
) -> None:
    found = next_limit(limit, start=start, most=10**9, seconds=seconds, bound=bound)
    assert found == (2 * limit if seconds <= bound else start)


@given(LIMITS, LIMITS)
def test_it_doubles_where_nobody_waited(limit: int, start: int) -> None:
    assert next_limit(limit, start=start, most=10**9, seconds=None, bound=0.0) == 2 * limit


def histogram(count: int, seconds: float, engine: str = "vllm") -> str:
    name = f"{engine}:time_to_first_token_seconds"
    return (
        f"# HELP {name} Histogram of time to first token in seconds.\n# TYPE {name} histogram\n"
        f'{name}_bucket{{le="0.001",model_name="m"}} 0.0\n{name}_bucket{{le="+Inf",model_name="m"}} {count}.0\n'
        f'{name}_count{{model_name="m"}} {count}.0\n{name}_sum{{model_name="m"}} {seconds}\n'
        f'# TYPE {name}_created gauge\n{name}_created{{model_name="m"}} 1.7955460151652913e+09\n'  # as vLLM 0.32 does
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_histogram_of_either_engine_is_read(engine: str) -> None:
    assert FirstTokens.read(histogram(4, 0.5, engine)) == FirstTokens(4.0, 0.5)


def test_histograms_of_several_processes_are_added() -> None:
    assert FirstTokens.read(histogram(4, 0.5) + histogram(2, 0.25)) == FirstTokens(6.0, 0.75)


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 3.0\n", "vllm:time_to_first_token_seconds_sum x\n"])
def test_a_page_without_the_histogram_tells_nothing(page: str) -> None:
    assert FirstTokens.read(page) is None


def rounds(concurrency: Concurrency, *seen: FirstTokens | None, tokens: int = 1, seconds: float = 1.0) -> list[int]:
    """The limits after rounds of full size, each followed by a look."""
    limits = []
    for one in seen:
        for _ in range(concurrency.limit):
            concurrency.started()
        assert [concurrency.ended(seconds, tokens) for _ in range(concurrency.limit)][-1]
        concurrency.look(one)
        limits.append(concurrency.limit)
    return limits


def test_guests_who_wait_longer_than_the_bound_bring_the_start_back() -> None:
    concurrency = Concurrency(start=8, most=1000, bound=0.5)
    concurrency.open(FirstTokens(0, 0.0))
    seen = [FirstTokens(10, 1.0), FirstTokens(30, 3.0), FirstTokens(70, 63.0), FirstTokens(80, 64.0)]
    assert rounds(concurrency, *seen) == [16, 32, 8, 16]


def test_the_bound_is_twice_what_guests_waited_before_the_job() -> None:
    concurrency = Concurrency(start=8, most=1000)
    concurrency.open(FirstTokens(100, 10.0))  # .1 s each
    assert rounds(concurrency, FirstTokens(110, 11.9), FirstTokens(130, 16.0)) == [16, 8]  # .19 s, .205 s


def test_rounds_in_which_only_the_job_asked_double_whatever_it_waited() -> None:
    concurrency = Concurrency(start=8, most=1000, bound=0.1)
    concurrency.open(FirstTokens(0, 0.0))
    assert rounds(concurrency, FirstTokens(8, 800.0), FirstTokens(24, 8000.0)) == [16, 32]


def test_an_endpoint_that_began_anew_says_nothing_of_the_round() -> None:
    concurrency = Concurrency(start=8, most=1000, bound=0.1)
    concurrency.open(FirstTokens(1000, 1000.0))
    assert rounds(concurrency, FirstTokens(900, 900.0)) == [16]


def test_a_page_that_is_away_for_a_round_changes_nothing() -> None:
    concurrency = Concurrency(start=8, most=1000, bound=0.1)
    concurrency.open(FirstTokens(0, 0.0))
    assert rounds(concurrency, FirstTokens(9, 0.0), None, FirstTokens(100, 0.0)) == [16, 16, 32]


def test_without_a_histogram_seconds_per_token_decide() -> None:
    concurrency = Concurrency(start=8, most=1000, bound=1e-9)  # which says nothing about tokens
    concurrency.open(None)
    assert rounds(concurrency, None, None, seconds=1.0) == [16, 32]
    assert rounds(concurrency, None, seconds=2.1) == [8]


def test_answers_that_come_while_the_page_is_asked_for_begin_no_other_look() -> None:
    concurrency = Concurrency(start=2, most=1000)
    concurrency.open(None)
    assert [concurrency.ended(1.0, 1) for _ in range(5)] == [False, True, False, False, False]


def test_a_refusal_brings_the_start_back() -> None:
    concurrency = Concurrency(start=8, most=1000)
    concurrency.open(None)
    rounds(concurrency, None, None)
    concurrency.refused()
    assert concurrency.limit == 8


def test_no_more_than_the_most_are_sent_and_then_nothing_is_looked_at() -> None:
    concurrency = Concurrency(start=8, most=4)
    assert (concurrency.limit, concurrency.doubles) == (4, False)
    assert not any(concurrency.ended(1.0, 1) for _ in range(10))
