"""How long and how often requests to an endpoint are tried again."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST = 3600.0  # seconds that an endpoint may ask to wait


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits that double, up to a bound, or as long as an endpoint says; and how many tries there are.

    With the values that hold by themselves, an endpoint that is gone for ten minutes is found again.
    """

    first: float = 1.0  # seconds
    most: float = 60.0
    tries: int = 16  # of an endpoint that does not answer, or has no time, one after the other
    row_tries: int = 4  # of a row of which the endpoint breaks
    connect_tries: int = 3  # of an endpoint that cannot be reached, before others get what it has

    def wait(self, times: int, told: float | None) -> float:
        """Return the seconds to wait after so many failed tries, at least one; `told` is what the endpoint says.

        One that says each time "a second" may be gone for minutes all the same.
        """
        doubled = min(self.most, self.first * 2.0 ** min(times - 1, 32))
        return max(doubled, min(told or 0.0, _LONGEST))


PATIENCE = Patience()
