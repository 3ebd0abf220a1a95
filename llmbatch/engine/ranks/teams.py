"""The teams of a model's other ranks, one at a time: the first one loads beside this process, later ones replace it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from llmbatch.engine.ranks.reports import RankLost
from llmbatch.engine.ranks.team import RankTeam
from llmbatch.errors import JobError

_STARTS: Final = 3
_log = logging.getLogger("llmbatch")


class RankTeams:
    """Starts the other ranks of a model, again where one has ended."""

    def __init__(self, start: Callable[[], RankTeam], ranks: int) -> None:
        """Start them by `start`, which may raise RankLost; `ranks` counts the first one, too."""
        self._start = start
        self._ranks = ranks
        self._loading: RankTeam | None = None

    def begin(self) -> None:
        """Start the ranks, which load their shares from now on. Raises JobError where that cannot be."""
        try:
            self._loading = self._start()
        except RankLost as lost:
            raise self._ended(lost) from lost

    def wait(self) -> None:
        """Wait till the ranks that were begun have loaded their shares, or one has ended, which `meet` finds."""
        if self._loading is not None:
            self._loading.wait()

    def meet(self, message: object) -> RankTeam:
        """Tell ranks what they compute on; returns them once all are ready.

        Starts ranks if there are none, and again where one was killed while it loaded. Raises JobError.
        """
        for attempt in range(_STARTS):
            try:
                team, self._loading = self._loading or self._start(), None
                team.meet(message)
                return team
            except RankLost as error:
                lost = error
            if not lost.by_signal:
                break
            if attempt < _STARTS - 1:
                _log.warning("%s before it had loaded the model: the ranks are started again", lost)
        raise self._ended(lost) from lost

    def end(self) -> None:
        """End the ranks that were begun and have not met."""
        if self._loading is not None:
            self._loading.end()
            self._loading = None

    def _ended(self, lost: RankLost) -> JobError:
        ended = f"the ranks of tensor_parallel={self._ranks} must all start, and {lost}"
        if lost.by_signal:
            ended += f" {_STARTS} times: if memory ran out, take fewer ranks or a smaller dtype"
        return JobError(ended)
