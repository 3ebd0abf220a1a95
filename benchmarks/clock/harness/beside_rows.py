"""The rows of a table of beside.py: those that are run, and those that are kept from the run before.

A table takes up to an hour. So each row is written to a file of its own as soon as it is there, and a run that was
stopped goes on by the same command.
"""

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
    ones; `missing` counts those that are not. `stopped` is the file of the rows of a run that was stopped.
    """

    def __init__(
        self,
        processes: int,
        stopped: Path,
        policies: Collection[str] | None = None,
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._processes, self._policies, self._stopped = processes, policies, stopped
        self._earlier = {_key(row["setting"]): row for row in earlier}
        self.missing = 0

    def end(self) -> None:
        """Forget the rows of runs that were stopped: the table is written."""
        self._stopped.unlink(missing_ok=True)

    def of(
        self, function: Callable[[dict[str, Any]], dict[str, Any]], settings: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the rows of settings, in their order, and say how far it is."""
        chosen = [each for each in settings if self._policies is None or each["policy"] in self._policies]
        stopped = self._read_stopped()
        results = {key: stopped[key] for key in map(_key, chosen) if key in stopped}
        left = [each for each in chosen if _key(each) not in results]
        with ProcessPoolExecutor(self._processes) as pool, self._stopped.open("a") as file:
            for setting, result in zip(left, pool.map(function, left), strict=True):
                name = setting.get("named", setting.get("per_second", setting.get("mix", "")))
                results[_key(setting)] = result
                print(json.dumps(result), file=file, flush=True)
                print(f"{len(results)} of {len(chosen)}: {name} {setting['policy']}", flush=True)
        found = [results.get(key, self._earlier.get(key)) for key in map(_key, settings)]
        self.missing += found.count(None)
        return [row for row in found if row is not None]

    def _read_stopped(self) -> dict[str, dict[str, Any]]:
        """Read the rows that are whole, and drop the one that a kill has cut."""
        if not self._stopped.exists():
            return {}
        text = self._stopped.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._stopped.write_text(whole)
        rows = map(json.loads, whole.splitlines())
        return {_key(row["setting"]): row for row in rows}


def _key(setting: Mapping[str, Any]) -> str:
    """Return the same for a setting and for the one in its row."""
    kept = {name: value for name, value in named(setting).items() if name not in _OF_SEARCH}
    return json.dumps(kept, sort_keys=True)
