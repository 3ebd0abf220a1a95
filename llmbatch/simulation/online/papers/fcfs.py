"""`fcfs`: vLLM's scheduler, to which all requests are alike.

One queue in order of arrival. A step has a budget of tokens. Those that have begun come first, in order of admission:
a decode takes one token, a prompt's rest what is left of the budget (chunked prefill). Where a page is lacking, the one
that was admitted last gives back all it has, waits again before all others, and is computed again later (recompute).
Then, if nobody had to, those that wait are admitted while budget, pages and the cap on running sequences last; the
first that does not fit stops it. (vLLM 0.8's V1 scheduler, `Scheduler.schedule`, priorities and prefix cache left out;
BROS's baseline is the same without chunks, which only makes it slower to answer.)

`go_on` and `admit` are the two halves of that step, over one lane: `round-robin` and `priority` use them too.
"""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.lanes import enter, front, give_all
from llmbatch.simulation.online.papers.run_state import JOB, RunState, behind, pages_wanted, take


@compiled
def decide(state: RunState) -> None:
    """Take rows for the next step."""
    if go_on(state, JOB, JOB):
        admit(state, JOB, state.rules.most_running - state.active[JOB])


@compiled
def go_on(state: RunState, lane: int, victims: int) -> bool:
    """Take those of a lane that have begun; whether nobody had to give pages back.

    Rows of the lane `victims` give theirs first, then rows of the lane itself.
    """
    undisturbed = True
    at = 0
    while at < state.active[lane] and state.load[0].tokens < state.rules.step_tokens:
        number = state.running[lane, at]
        count = min(behind(state, number), state.rules.step_tokens - state.load[0].tokens)
        while pages_wanted(state, number, count) > state.totals[0].free:
            undisturbed = False
            loser = last_of(state, victims if state.active[victims] else lane)
            give_all(state, loser)
            if loser == number:
                return undisturbed
        take(state, number, count)
        at += 1
    return undisturbed


@compiled
def last_of(state: RunState, lane: int) -> int:
    """Return the row of a lane that was admitted last."""
    number: int = state.running[lane, state.active[lane] - 1]
    return number


@compiled
def admit(state: RunState, lane: int, places: int) -> None:
    """Admit at most `places` rows of a lane, until one does not fit."""
    while places > 0 and state.load[0].tokens < state.rules.step_tokens:
        number = front(state, lane)
        if number < 0:
            return
        count = min(behind(state, number), state.rules.step_tokens - state.load[0].tokens)
        if pages_wanted(state, number, count) > state.totals[0].free:
            return
        take(state, enter(state, lane), count)
        places -= 1
