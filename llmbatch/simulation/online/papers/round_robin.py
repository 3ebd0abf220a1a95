"""`round-robin`: two queues that take turns, a step each (BROS 2.2, and its baseline RR of 7.1).

"The system maintains two FCFS queues for RT and BE requests, respectively, and serves them in an interleaving manner at
the iteration level." So a step holds rows of one lane only, decided as `fcfs` decides; where that lane has nothing that
can be done, the other is served. How gaps were read: a lane's rows keep their pages while the other is served, a page
that is lacking is taken from the lane's own last row (RR has no two-ended blocks), and each lane has the whole cap.
"""

from __future__ import annotations

from llmbatch.compilation.decorators import compiled
from llmbatch.simulation.online.papers.fcfs import admit, go_on
from llmbatch.simulation.online.papers.run_state import JOB, ONLINE, RunState


@compiled
def decide(state: RunState) -> None:
    """Take rows of the lane whose turn it is."""
    turn = JOB if state.totals[0].turn == ONLINE else ONLINE
    for lane in (turn, JOB + ONLINE - turn):
        if go_on(state, lane, lane):
            admit(state, lane, state.rules.most_running - state.active[lane])
        if state.load[0].rows:
            state.totals[0].turn = lane
            return
