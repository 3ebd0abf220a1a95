"""When a job would end at endpoints, by their own forecasts and the load that they have had.

Each endpoint forecasts the rows as if it were idle. Which share of its time its guests took in the last hour, or since
it began, is in its `/metrics`. So much less is left for the job. Several endpoints share the rows by what is left of
each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import httpx

from llmbatch.errors import InputError, JobError
from llmbatch.remote.endpoint import reason_of
from llmbatch.remote.replies import message_of
from llmbatch.remote.windows.messages import FORECAST

_SECONDS: Final = 600.0  # that a forecast may take
_MOST: Final = 0.95  # of an endpoint that guests are taken to need: something is left
_SHARE: Final = re.compile(r"^llmbatch:guest_time_share(?:\{[^}]*\})?\s+([0-9.eE+-]+)$", re.MULTILINE)
_LONGER: Final = ("seconds", "seconds_least", "seconds_most", "input_order_seconds")

Figures = dict[str, Any]  # those of a forecast


def forecast_at(urls: Sequence[str], key: str | None, data: bytes) -> Figures:
    """Ask endpoints for forecasts of rows, written as a window, and join these. Raises InputError and JobError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    found = []
    for url in urls:
        with httpx.Client(base_url=url, headers=headers, timeout=_SECONDS) as client:
            try:
                reply, metrics = client.post(FORECAST, content=data), client.get("/metrics")
            except httpx.TransportError as error:
                raise JobError(f"the endpoint {url} cannot be reached ({reason_of(error)}): start it first") from None
        if reply.status_code != 200:
            said = message_of(reply.content)
            raise InputError(f"the endpoint {url} refused to forecast ({reply.status_code}): {said}")
        share = share_of_guests(metrics.text) if metrics.status_code == 200 else 0.0
        found.append(beside_guests(json.loads(reply.content), share))
    return joined(found)


def share_of_guests(metrics: str) -> float:
    """Return the share of its time that an endpoint says its guests took lately; 0 where it does not tell."""
    told = _SHARE.search(metrics)
    return float(told[1]) if told is not None else 0.0


def beside_guests(figures: Figures, share: float) -> Figures:
    """Return a forecast beside guests who take such a share of the endpoint's time."""
    share = min(_MOST, share)
    note = f"guests are taken to need {share:.0%} of the endpoint, as they have in the last hour or since it began"
    return {**_times(figures, 1 / (1 - share)), "notes": [note, *figures["notes"]]}


def joined(found: Sequence[Figures]) -> Figures:
    """Join the forecasts of endpoints that share the same rows."""
    first = found[0]
    each = [figures["seconds"] or figures["seconds_most"] for figures in found]
    if len(found) == 1 or min(each) <= 0:
        return first
    note = f"{len(found)} endpoints share the rows"
    return {**_times(first, 1 / sum(each[0] / seconds for seconds in each)), "notes": [note, *first["notes"]]}


def _times(figures: Figures, factor: float) -> Figures:
    longer = {name: None if figures[name] is None else figures[name] * factor for name in _LONGER}
    return {**figures, **longer}
