"""llmbatch with one number type against llmbatch with another on the same rows, in one run, alternating.

    python benchmarks/peers/peer_dtype.py --dtype int8 --peer-dtype bfloat16 [--mix demo] [--every 4] [--rounds 3]

What a round is, and what of it is counted, says `peers/rounds.py`. How far answers agree says `precision.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

from rounds import DTYPES, Figures, Peer, Work, measure_llmbatch, run


def measure(work: Work) -> Figures:
    """Answer the rows with the other type."""
    return measure_llmbatch({**work, "dtype": work["settings"]["dtype"]})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its type."""
    parser.add_argument("--peer-dtype", choices=DTYPES, default="bfloat16")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Its type, as `measure` finds it."""
    return {"dtype": options.peer_dtype}


def environment(_: argparse.Namespace) -> dict[str, str]:
    """That of llmbatch in a round."""
    return {"GOMP_SPINCOUNT": "300000"}


if __name__ == "__main__":
    raise SystemExit(run(Peer("other-dtype", measure, add_options, settings, environment)))
