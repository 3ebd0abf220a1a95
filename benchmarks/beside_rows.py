"""The rows of a table of beside.py: those that are run, and those that are kept from the run before."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_OF_SEARCH = ("named", "alone_ttft_p99", "bound_rows")


def named(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with the names of traces in place of their files."""
    offline = [Path(source).stem for source in setting.get("offline", ())]
    return {**setting, "online": Path(setting["online"]).stem, **({"offline": offline} if offline else {})}


class Rows:
    """Runs settings side by side in so many processes, or keeps their rows.

    Only settings of the `policies` are run, None: all. Of the others the rows are kept that are among the `earlier`
    ones; `missing` counts those that are not.
    """

    def __init__(
        self, processes: int, policies: Collection[str] | None = None, earlier: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._processes, self._policies = processes, policies
        self._earlier = {_key(row["setting"]): row for row in earlier}
        self.missing = 0

    def of(
        self, function: Callable[[dict[str, Any]], dict[str, Any]], settings: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the rows of settings, in their order, and say how far it is."""
        chosen = [each for each in settings if self._policies is None or each["policy"] in self._policies]
        results: dict[str, dict[str, Any]] = {}
        with ProcessPoolExecutor(self._processes) as pool:
            for setting, result in zip(chosen, pool.map(function, chosen), strict=True):
                name = setting.get("named", setting.get("per_second", setting.get("mix", "")))
                results[_key(setting)] = result
                print(f"{len(results)} of {len(chosen)}: {name} {setting['policy']}", flush=True)
        found = [results.get(key, self._earlier.get(key)) for key in map(_key, settings)]
        self.missing += found.count(None)
        return [row for row in found if row is not None]


def _key(setting: Mapping[str, Any]) -> str:
    """Return the same for a setting and for the one in its row."""
    kept = {name: value for name, value in named(setting).items() if name not in _OF_SEARCH}
    return json.dumps(kept, sort_keys=True)
