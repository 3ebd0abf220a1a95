"""Work folders cut, swapped and edited at random: each is refused clearly or recovered from, none silently wrong.

    python benchmarks/jobs/corruptions.py [--corruptions 200] [--seed 0]

A job of one of the set-ups of `tests.support.setups` is killed at a random file operation. A random file of its work
folder is cut anywhere, swapped with another one, changed in one byte, or, where it is JSON, changed in one value. The
plain command must then write all rows right, or say in a sentence of ours what is wrong; and starting over must be a
way out.
Prints one line of JSON; exit status 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.corruptions import Corruption
from tests.support.models import tiny_model_folder
from tests.support.setups import SETUPS, Failure, warm_up
from tests.support.tokenizers import CHAT_TEMPLATE


def main(arguments: Sequence[str] | None = None) -> int:
    """Corrupt, run and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description="Corrupt work folders.")
    parser.add_argument("--corruptions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the jobs lie (a temporary folder)")
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(given.seed)
    ends: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        model = tiny_model_folder(folder / "model", "llama", chat_template=CHAT_TEMPLATE)
        warm_up(model, folder)
        cases: dict[int, Corruption] = {}
        for at in rng.integers(len(SETUPS), size=given.corruptions).tolist():
            try:
                if at not in cases:
                    cases[at] = Corruption(SETUPS[at], model, folder / str(at))
                ends[cases[at].corrupt(rng)] += 1
            except Failure as failure:
                failures.append(str(failure))
                print(failure, file=sys.stderr, flush=True)
    print(json.dumps({"corruptions": given.corruptions, "seed": given.seed, **ends, "failures": failures}))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
