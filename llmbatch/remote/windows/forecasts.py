"""When a job would end at endpoints, by their own forecasts and the load that they have had.

Each endpoint forecasts the rows as if it were idle. What its guests take is estimated from outside: their tokens each
second, since it began, by its `/metrics`, at the seconds that a token of the job takes there. So much less is left for
the job. Several endpoints share the rows by what is left of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from llmbatch.errors import InputError, JobError
from llmbatch.remote.endpoint import reason_of
from llmbatch.remote.replies import message_of
from llmbatch.remote.windows.messages import FORECAST

_SECONDS: Final = 600.0  # that a forecast may take
_MOST: Final = 0.95  # of an endpoint that guests are taken to need: something is left
_SAMPLE: Final = re.compile(r"^llmbatch:(prompt|generation)_tokens_(total|created)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
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
        rate = tokens_each_second(metrics.text, metrics.headers) if metrics.status_code == 200 else 0.0
        found.append(beside_guests(json.loads(reply.content), rate))
    return joined(found)


def tokens_each_second(metrics: str, headers: Mapping[str, str]) -> float:
    """Return the tokens each second that guests have had since an endpoint began; 0 where it does not tell."""
    told: dict[str, list[float]] = {"total": [], "created": []}
    for _, what, value in _SAMPLE.findall(metrics):
        told[what].append(float(value))
    try:
        seconds = parsedate_to_datetime(headers.get("date", "")).timestamp() - min(told["created"])
    except (TypeError, ValueError):
        return 0.0
    return sum(told["total"]) / seconds if seconds > 0 else 0.0


def beside_guests(figures: Figures, rate: float) -> Figures:
    """Return a forecast beside guests who have so many tokens each second."""
    computed = figures["input_tokens"] * (1 - figures["prefix_sharing_optimal"]) + figures["output_tokens"]
    seconds = figures["seconds"] or figures["seconds_most"]
    share = min(_MOST, rate * seconds / computed) if computed > 0 else 0.0
    note = f"guests are taken to need {share:.0%} of the endpoint, as they have since it began"
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
