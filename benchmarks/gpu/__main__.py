"""The engine on a GPU: ceilings, kernels, layers, steps and whole jobs, in parts of a few minutes.

    python benchmarks/gpu [PART ...] --out FOLDER [--device cuda] [--traces FOLDER] [--orders ORDER,...]
    python benchmarks/gpu [PART ...] --dry-run

Parts are `smoke`, `ceilings`, `kernels`, `layers`, `steps`, `mixed`, `table2-1`, `table2-4`, `strategies`, `peer` and
`full`; without any all of them run, in this order. `smoke` ends the run if an answer is wrong. It needs torch,
transformers, triton, numpy, numba and pyarrow, and one NVIDIA GPU. Each part writes `PART.json` into the folder after
each of its results, with the card's name, versions, date and ceilings, and pictures when it is done. `--traces`, or
$LLMBATCH_TRACES, is a folder with azure2023_code, mmlu_5shot and video_panda70m as Parquet, which whole jobs need;
`--orders` are those that `table2-1` and `table2-4` run in. `--dry-run` runs everything in sizes that Triton's
interpreter can do on a processor: its figures say nothing, and are not written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
MIXES = ("table2-1", "table2-4")
PARTS = ("smoke", "ceilings", "kernels", "layers", "steps", "mixed", *MIXES, "strategies", "peer", "full")


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description="Measure the engine on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N (cuda)")
    parser.add_argument("--traces", default=os.environ.get("LLMBATCH_TRACES"), help="folder ($LLMBATCH_TRACES)")
    parser.add_argument("--orders", default="blend,dfs,random", help="of whole jobs (blend,dfs,random)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter")
    given = parser.parse_args()
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        parser.error(f"a part must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    if not given.dry_run and given.out is None:
        parser.error("--out must be given unless --dry-run is")
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is made
    # Not this folder itself, whose modules would stand before others of their names.
    sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path) != HERE), str(HERE.parent.parent)]
    from gpu.pictures import draw
    from gpu.stage import Stage

    stage = Stage(given.device, dry=given.dry_run, traces=given.traces)
    for name in given.parts or PARTS:
        if name in MIXES:
            results = import_module("gpu.jobs").measure(stage, name, given.orders.split(","))
        else:
            results = import_module(f"gpu.{name}").measure(stage)
        found = {}
        for key, value in results:
            print(f"{name}, {key}: {json.dumps(value)}", flush=True)
            found[key] = value
            if not given.dry_run:
                told = json.dumps(stage.identity() | {"part": name, "result": found}, indent=1)
                write(given.out, {f"{name}.json": told + "\n"})
        pictures = draw(name, found)
        if not given.dry_run:
            write(given.out, pictures)
    return 0


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into the folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
