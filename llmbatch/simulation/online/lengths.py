"""Requests whose lengths are drawn from a distribution, where there is no trace: `lognormal:...` and `uniform:...`.

`lognormal:MEAN[/STD],MEAN[/STD]` are prompt and output tokens by mean and standard deviation (that of a mean alone is
the mean), `uniform:LOW-HIGH,LOW-HIGH` whole numbers, both ends included. Names of the papers' own:

- `bros-sharegpt`, `bros-lmsys`: the means and deviations of BROS's Table 2, by log-normal distributions.
- `bros-be`: its best-effort requests (7.1).
- `ooco-offline`: the means of OOCO's offline requests (Table 5); it gives no deviation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.errors import ParameterError
from llmbatch.simulation.traces import SYSTEM_PROMPT, Trace

NAMED: Mapping[str, str] = MappingProxyType(
    {
        "bros-sharegpt": "lognormal:222.76/256.36,234.51/268.50",
        "bros-lmsys": "lognormal:90.50/148.52,237.04/228.21",
        "bros-be": "uniform:512-1024,32-128",
        "ooco-offline": "lognormal:1200,672",
    }
)
_LONGEST: Final = 8192  # tokens: the tail of a log-normal is cut there


def is_drawn(name: str) -> bool:
    """Tell whether a trace is a distribution rather than a file."""
    return name in NAMED or name.startswith(("lognormal:", "uniform:"))


def drawn_trace(name: str, count: int, rng: np.random.Generator) -> Trace:
    """Draw so many requests, which share nothing. Raises ParameterError for anything but a distribution.

    >>> drawn_trace("uniform:512-1024,32-128", 3, np.random.default_rng(0)).prompt_lengths.tolist()
    [948, 838, 774]
    """
    kind, _, rest = NAMED.get(name, name).partition(":")
    sides = rest.split(",")
    try:
        if kind not in ("lognormal", "uniform") or len(sides) != 2:
            raise ValueError("of another form")
        draw = _lognormal if kind == "lognormal" else _uniform
        prompt, output = (draw(side, count, rng) for side in sides)
    except ValueError:
        raise ParameterError(
            "a distribution must be lognormal:MEAN[/STD],MEAN[/STD], uniform:LOW-HIGH,LOW-HIGH or one of "
            f"{', '.join(NAMED)}, got {name!r}"
        ) from None
    zeros = np.zeros(count + 1, np.int64)
    return Trace((name,), np.zeros(count, np.int32), prompt, output, np.empty(0, np.int32), zeros, SYSTEM_PROMPT)


def _lognormal(text: str, count: int, rng: np.random.Generator) -> NDArray[np.int32]:
    mean, _, deviation = text.partition("/")
    mu = float(mean)
    sigma = float(deviation) if deviation else mu
    if not (mu > 0 and sigma > 0):
        raise ValueError("not above 0")
    variance = np.log1p((sigma / mu) ** 2)
    drawn = rng.lognormal(np.log(mu) - variance / 2, np.sqrt(variance), count)
    return np.clip(np.rint(drawn), 1, _LONGEST).astype(np.int32)


def _uniform(text: str, count: int, rng: np.random.Generator) -> NDArray[np.int32]:
    low, high = (int(end) for end in text.split("-"))
    if not 1 <= low <= high:
        raise ValueError("not ascending from 1 on")
    return rng.integers(low, high + 1, count).astype(np.int32)
