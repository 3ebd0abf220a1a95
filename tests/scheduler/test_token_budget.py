"""How many tokens a step is given."""

from __future__ import annotations

from llmbatch.perf_model.work import Rates
from llmbatch.scheduler.token_budget import (
    MOST_TOKENS,
    TILE,
    BudgetRules,
    ClosedLoopBudget,
    FixedBudget,
    Load,
    share_of_steps,
    step_tokens,
)

RATES = Rates(
    seconds_per_token=1e-4,
    seconds_per_sample=0.0,
    seconds_per_pair=0.0,
    seconds_per_kv_token=1e-7,
    weight_seconds=0.02,
    weights_share_memory=False,
)
CLOSED = BudgetRules.of(ClosedLoopBudget(RATES))


def load(*, decodes: int = 10, kv_tokens: int, compute: float, memory: float) -> Load:
    return Load(decodes, kv_tokens, compute, memory)


def test_compute_keeps_the_ratio_of_what_is_left_to_the_memory_time_of_the_step() -> None:
    """A million KV tokens take 0.1 s; with twice as much compute left as memory, 0.2 s of it are 2,000 tokens."""
    assert step_tokens(CLOSED, load(kv_tokens=10**6, compute=8.0, memory=4.0)) == 16 * TILE


def test_tokens_that_are_free_while_the_weights_are_read_are_not_rounded() -> None:
    assert step_tokens(CLOSED, load(kv_tokens=1000, compute=1.0, memory=1.0)) == 200
    assert 200 % TILE != 0


def test_decodes_beyond_what_is_wanted_run_alone() -> None:
    assert step_tokens(CLOSED, load(decodes=700, kv_tokens=1000, compute=1.0, memory=1.0)) == 700


def test_a_pool_in_which_nothing_decodes_is_filled_at_once() -> None:
    assert step_tokens(CLOSED, load(decodes=0, kv_tokens=0, compute=1.0, memory=1.0)) == 8192


def test_a_fixed_budget_does_not_look_at_the_work() -> None:
    rules = BudgetRules.of(FixedBudget(512))
    assert step_tokens(rules, load(kv_tokens=10**6, compute=8.0, memory=1.0)) == 512
    assert step_tokens(rules, load(decodes=600, kv_tokens=10**6, compute=8.0, memory=1.0)) == 600


def test_a_step_gets_its_share_of_a_short_job_in_whole_tiles() -> None:
    assert share_of_steps(900_000.0, 2000.0, RATES) == 4 * TILE


def test_a_large_share_is_all_that_a_step_may_have() -> None:
    assert share_of_steps(2047.0, 1.0, RATES) == 16 * TILE
    assert share_of_steps(2048.0, 1.0, RATES) == MOST_TOKENS


def test_a_floor_holds_where_little_memory_is_read() -> None:
    least = BudgetRules.of(ClosedLoopBudget(RATES, floor=512))
    assert step_tokens(least, load(kv_tokens=1000, compute=1.0, memory=1.0)) == 512
