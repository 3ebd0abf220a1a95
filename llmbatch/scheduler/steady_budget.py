"""The step budget of rows of one kind, which nothing but the pace of a fixed budget has to mix.

A fixed budget starts rows at a steady rate, and soon each step holds rows of every age: its compute over its memory
time is that of the kind. That is so at any budget, so the ramp at both ends decides. While the first rows generate,
little memory is read, and while the last ones do, little is computed: as many steps each as an answer has tokens,
and each as long as its budget takes. So few tokens are best, but for three bounds. Below twice the tokens that are
free while the weights are read, what is lost by ending chunks on whole pages counts. Where every step takes `s`
seconds beside its work, a job of T seconds spends s T / t on that and d t / 2 on its ramps with steps of t seconds:
least at t = (2 s T / d)^(1/2). And where weights and KV come from the same memory (law `bytes`), a pool that is not
full reads the weights more often: there the budget is what the memory time of a full pool hides.
"""

from __future__ import annotations

import math

from llmbatch.perf_model.cost import CostModel
from llmbatch.planning.plan import Plan
from llmbatch.scheduler.token_budget import MOST_TOKENS, TILE, FixedBudget


def steady_budget(decided: Plan, cost: CostModel, pool_tokens: int, answer: float) -> FixedBudget:
    """The budget for a plan whose rows are of one kind and generate `answer` tokens in the mean."""
    token = float(cost.prompt_seconds(1))
    wanted = 2 * cost.weight_seconds / token
    if cost.hardware.step_seconds > 0:
        total = decided.optimal_seconds
        wanted = max(wanted, math.sqrt(2 * cost.hardware.step_seconds * total / max(answer, 1.0)) / token)
    if cost.law == "bytes":
        wanted = max(wanted, decided.density * pool_tokens * cost.kv_token_seconds / token)
    return FixedBudget(int(min(max(round(wanted / TILE), 2) * TILE, MOST_TOKENS)))
