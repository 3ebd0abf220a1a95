"""How many tokens the next step computes: the mix is steered each step from the work that remains.

Let `m` be the memory time of the step's decodes, `C` and `M` the compute and memory work still to do. If every
step's compute is `C / M` times its memory time, both end together, which is the best any order can do when the
two overlap. So a step is given the tokens whose compute takes `c* = (C / M) m`. It is never given fewer than are
free while the weights are read. Nor is it so short that the fixed time of a step would be most of it. Attention of
prompts is paid for in tokens that take as long, except for the tokens hidden behind the weights: reading weights hides
products, not attention. BlendServe (section 5.3) fixes shares of memory and hopes that the mix follows; here the mix
itself is the controlled quantity.

Rows of one kind (`steady_budget`). A fixed budget starts them at a steady rate, and soon each step holds rows of every
age: its compute over its memory time is that of the kind. That is so at any budget, so the ramp at both ends decides.
While the first rows generate, little memory is read, and while the last ones do, little is computed: as many steps each
as an answer has tokens, and each as long as its budget takes. So few tokens are best, but for three bounds. Below twice
the tokens that are free while the weights are read, what is lost by ending chunks on whole pages counts. Where every
step takes `s` seconds beside its work, a job of T seconds spends s T / t on that and d t / 2 on its ramps with steps of
t seconds: least at t = (2 s T / d)^(1/2). And where weights and KV come from the same memory (law `bytes`), a pool that
is not full reads the weights more often: there the budget is what the memory time of a full pool hides. Beside guests
rows of the job have a part of the pool, and that part of the budget: with all of it they would be computed in a few
long steps, and the others would have nothing to hide behind.

Mixtures of experts. Products of an expert take whole tiles of rows, so each step computes for about half a tile of each
expert beside its work: these are such seconds `s`, too. But steps of more tokens than they have while the pool is full
are no fewer, for the pool decides then how many there are; and tokens in tiles that stand there anyway are free, as
those are that hide behind the reading of the weights.

Engines that run in turn hide nothing of one row behind another. Ramps cost them nothing, and neither does a mix: what a
budget changes is how many steps there are. Under law `bytes`, as on a processor, each of them reads the weights. So a
step has as many tokens as make the seconds of that `_BESIDE` of the seconds of its products (`budget_in_turn`). Under
law `paper`, as on a card, each takes its fixed time, and tokens are free until their products hide the weights: a step
that has fewer wastes them. A short job has about as many steps as its longest answer has tokens, and each gets its
share of all tokens (`share_of_steps`): the longest rows begin early, and prompts are left for the steps in which they
generate alone. In a job whose share is large, and of rows of one kind, they begin as soon as there is room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from llmbatch.compilation.decorators import as_python, compiled
from llmbatch.compilation.references import by_reference
from llmbatch.perf_model.cost import CostModel
from llmbatch.perf_model.work import Rates, hidden_seconds, memory_seconds, padding_of_many_rows
from llmbatch.planning.plan import Plan

STEP_TOKENS: Final = 2048  # of a fixed budget, unless another one is asked for
TILE = 128  # tokens; matrix units work in tiles of this many rows
_BESIDE: Final = 0.01  # of a step's products: the reading of its weights, where parts run in turn


class Load(NamedTuple):
    """What a budget is decided from, at the start of a step."""

    decodes: int  # sequences that will compute one token
    kv_tokens: float  # KV tokens they read, those read together once
    remaining_compute: float  # seconds of compute of everything not yet done
    remaining_memory: float  # seconds of KV reads of everything not yet done


MOST_TOKENS: Final = 8192  # of a step that is decided in closed loop, where the weights are read at a device's speed


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same number of tokens each step, as today's engines do; decodes beyond it are computed all the same."""

    step_tokens: int = STEP_TOKENS


@dataclass(frozen=True, slots=True)
class SteadyBudget:
    """The same number of tokens each step, by which rows of one kind keep a pool full; of a part of it, that part."""

    step_tokens: int


@dataclass(frozen=True, slots=True)
class ClosedLoopBudget:
    """`c* = (C / M) m`, between a floor and a ceiling, from two tiles on rounded to tiles; decodes are never held back.

    Under law `bytes` a step reads the weights as well, W / B beside m; the memory work left then counts them once
    for each filling of the pool, `weights_per_pool` being weight bytes over the pool's.
    """

    rates: Rates
    weights_per_pool: float = 0.0
    floor: int = TILE
    ceiling: int = MOST_TOKENS


Budget = FixedBudget | SteadyBudget | ClosedLoopBudget


@by_reference
class BudgetRules(NamedTuple):
    """A `Budget` as compiled code sees it; fixed where `fixed` is positive."""

    fixed: int
    rates: Rates
    weights_per_pool: float
    floor: int
    ceiling: int
    steady: bool = False

    @classmethod
    def of(cls, budget: Budget) -> BudgetRules:
        """Return the rules of a `Budget`."""
        if not isinstance(budget, ClosedLoopBudget):
            steady = isinstance(budget, SteadyBudget)
            return cls(budget.step_tokens, Rates(0.0, 0.0, 0.0, 0.0, 0.0, False), 0.0, 0, 0, steady)
        return cls(0, budget.rates, budget.weights_per_pool, budget.floor, budget.ceiling)


def steady_budget(decided: Plan, cost: CostModel, pool_tokens: float, answer: float) -> FixedBudget | SteadyBudget:
    """Build the budget for a plan whose rows are of one kind and generate `answer` tokens in the mean."""
    if cost.overlap.exponent == 1:
        return budget_in_turn(cost) if cost.law == "bytes" else FixedBudget(most_tokens(cost.rates))
    rates, token = cost.rates, float(cost.prompt_seconds(1))
    full = decided.density * pool_tokens * rates.seconds_per_kv_token / token
    padded = _least_with_ramps(as_python(padding_of_many_rows)(rates), decided, answer) / token
    wanted = max(2 * rates.weight_seconds, _least_with_ramps(rates.step_seconds, decided, answer)) / token
    wanted = max(wanted, min(padded, full))
    return SteadyBudget(_in_tiles(max(wanted, full) if cost.law == "bytes" else wanted, rates))


def _least_with_ramps(beside: float, decided: Plan, answer: float) -> float:
    """Return the seconds of steps by which a job ends soonest, if each takes `beside` in addition to its work."""
    return math.sqrt(2 * beside * decided.optimal_seconds / max(answer, 1.0))


def budget_in_turn(cost: CostModel) -> FixedBudget:
    """Build the budget for an engine that runs in turn under law `bytes`: see the module's text."""
    rates = cost.rates
    wanted = (rates.step_seconds + rates.weight_seconds) / (_BESIDE * rates.seconds_per_token)
    return FixedBudget(_in_tiles(wanted, rates))


def share_of_steps(tokens: float, longest: float, rates: Rates) -> int:
    """Return a step's share of a job's tokens if there are as many steps as the longest answer has tokens.

    A large share is all that a step may have.
    """
    share = tokens / max(longest, 1.0)
    return _in_tiles(share, rates) if share < STEP_TOKENS else most_tokens(rates)


def most_tokens(rates: Rates) -> int:
    """Return the most tokens of a step: twice those that hide the reading of the weights, if these come from far.

    They are no more than a step has memory for.
    """
    hidden = int(rates.weight_seconds / rates.seconds_per_token)
    wanted = max(MOST_TOKENS, 2 * hidden // TILE * TILE)
    return min(wanted, rates.step_tokens) if rates.step_tokens else wanted


def _in_tiles(tokens: float, rates: Rates) -> int:
    return int(min(max(round(tokens / TILE), 2) * TILE, most_tokens(rates)))


@compiled
def step_tokens(rules: BudgetRules, load: Load) -> int:
    """Count the tokens of a step, prefill and decode; attention and sampling are paid for in tokens (`prices`)."""
    if rules.fixed > 0:
        return max(rules.fixed, load.decodes)
    if load.decodes == 0:
        return rules.ceiling
    rates = rules.rates
    memory = memory_seconds(rates, load.kv_tokens)
    remaining_memory = max(load.remaining_memory, memory)
    remaining_compute = max(load.remaining_compute, 0.0)
    if rates.weights_share_memory:
        ratio = remaining_compute / (remaining_memory * (1 + rules.weights_per_pool))
        target = max(ratio * (memory + rates.weight_seconds), rates.step_seconds)
    else:
        target = max(remaining_compute / remaining_memory * memory, hidden_seconds(rates) + rates.step_seconds)
    tokens = min(max(int(target / rates.seconds_per_token), rules.floor), rules.ceiling)
    if tokens >= 2 * TILE:  # of fewer most are free while the weights are read, and rounding would lose some
        tokens = (tokens + TILE // 2) // TILE * TILE
    return max(tokens, load.decodes)


@compiled
def prices(rules: BudgetRules) -> tuple[float, float, float]:
    """Return what a pair of query and key, and a sampled token, take of the budget; and what attention gets anyway.

    All are 0 if the budget is fixed. Where the reading of the weights hides products it does not hide attention, so a
    chunk whose attention takes long gets all the tokens whose products are hidden.
    """
    if rules.fixed > 0:
        return 0.0, 0.0, 0.0
    rates = rules.rates
    hidden = 0.0 if rates.weights_share_memory else hidden_seconds(rates)
    pair, sample = prices_of(rates)
    return pair, sample, hidden / rates.seconds_per_token


@compiled
def prices_of(rates: Rates) -> tuple[float, float]:
    """Return the tokens that take as long as a pair of query and key, and as a sampled token."""
    return rates.seconds_per_pair / rates.seconds_per_token, rates.seconds_per_sample / rates.seconds_per_token
