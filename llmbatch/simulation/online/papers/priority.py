"""`priority`: online requests first, and the job is preempted for them, row by row.

OOCO's baseline "online priority" (5.1.4) on one engine, which is also what schedulers with priorities do: a step takes
the online requests that have begun, admits those that wait, and fills what is left of its budget with the job. An
online request that lacks pages or a place takes them from the job's row that was admitted last, which gives back all it
has and is computed again. The paper's baseline "restricts the decode batch size to safeguard online SLOs" by a limit
that it does not give: here it is the cap on running sequences, and tables show several.
"""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.fcfs import admit, go_on, last_of
from llmbatch.simulation.online.papers.lanes import front, give_all
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState, behind, pages_wanted


@compiled
def decide(state: RunState) -> None:
    """Take rows for the next step."""
    active, most = state.active, state.rules.most_running
    before = active[ONLINE]
    go_on(state, ONLINE, JOB)
    fits = active[ONLINE] == before  # nobody that waits is admitted in a step that preempted its like
    while fits and front(state, ONLINE) >= 0 and state.load[0].tokens < state.rules.step_tokens:
        _make_way(state)
        before = active[ONLINE]
        admit(state, ONLINE, min(1, most - active[ONLINE] - active[JOB]))
        fits = active[ONLINE] > before
    if go_on(state, JOB, JOB) and state.totals[0].preempted == 0:
        admit(state, JOB, most - active[ONLINE] - active[JOB])


@compiled
def _make_way(state: RunState) -> None:
    """Preempt the job until the online request that waits has a place and pages, or nothing is left to preempt."""
    number = front(state, ONLINE)
    tokens = min(behind(state, number), state.rules.step_tokens - state.load[0].tokens)
    while state.active[JOB] and (
        state.active[ONLINE] + state.active[JOB] >= state.rules.most_running
        or pages_wanted(state, number, tokens) > state.totals[0].free
    ):
        give_all(state, last_of(state, JOB))
