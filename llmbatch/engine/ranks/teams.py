"""The teams of a model's other ranks, one at a time: the first one loads beside this process, later ones replace it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from llmbatch.engine.ranks.processes import RankProcesses
from llmbatch.engine.ranks.reports import RankLost
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.errors import JobError

_STARTS: Final = 3
_log = logging.getLogger("llmbatch")


class RankTeams:
    """Starts the other ranks of a model, again where one has ended."""

    def __init__(self, start: Callable[[RankProcesses], RankTeam], ranks: int) -> None:
        """Give processes their work by `start`; `ranks` counts the first one, too."""
        self._start = start
        self._ranks = ranks
        self._loading: RankTeam | None = None

    def begin(self, processes: RankProcesses) -> None:
        """Have processes load the ranks' shares from now on."""
        self._loading = self._start(processes)

    def wait(self) -> None:
        """Wait till the ranks that were begun have loaded their shares, or one has ended, which `meet` finds."""
        if self._loading is not None:
            self._loading.wait()

    def meet(self, message: object) -> RankTeam:
        """Tell ranks what they compute on; returns them once all are ready.

        Starts processes if there are none, and again where one was killed while it loaded. Raises JobError.
        """
        for attempt in range(_STARTS):
            try:
                team, self._loading = self._loading or self._start(RankProcesses(self._ranks)), None
                team.meet(message)
                return team
            except RankLost as error:
                lost = error
            if not lost.by_signal:
                break
            if attempt < _STARTS - 1:
                _log.warning("%s before it had loaded the model: the ranks are started again", lost)
        ended = f"the ranks of tensor_parallel={self._ranks} must all start, and {lost}"
        if lost.by_signal:
            ended += f" {_STARTS} times: if memory ran out, take fewer ranks or a smaller dtype"
        raise JobError(ended) from lost
