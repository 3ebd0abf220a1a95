"""The engine on a GPU: ceilings, kernels, layers, steps and whole jobs, in parts of a few minutes.

    python benchmarks/gpu [PART ...] --out FOLDER [--device cuda] [--traces FOLDER] [--orders ORDER,...]
                          [--layers 32] [--rows 2000] [--pool-tokens N] [--runs 10]
    python benchmarks/gpu [PART ...] --dry-run

Parts are `smoke`, `ceilings`, `kernels`, `layers`, `steps`, `sampling`, `mixed`, `table2-1`, `table2-4`, `strategies`,
`peer`, `weights`, `ranks` and `full`; without any all of them run, in this order. `smoke` ends the run if an answer is
wrong; another part that fails is told, and the others go on. It needs torch, transformers, triton, numpy, numba and
pyarrow, and one NVIDIA GPU; `ranks` needs several. Each part writes `PART.json` into the folder after each of its
results, with the card's name, versions, date and ceilings, and pictures when it is done. `--traces`, or
$LLMBATCH_TRACES, is a folder with azure2023_code, mmlu_5shot and video_panda70m as Parquet, which whole jobs need.
`--orders` are those that `table2-1` and `table2-4` run in, with a colon and the tokens of a step where these are fixed.
Where time is short, `--layers` makes the model smaller, `--rows` and `--pool-tokens` jobs, and `--runs` times steps and
kernels fewer times. `--dry-run` runs everything in sizes that Triton's interpreter can do on a processor: its figures
say nothing, and are not written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIXES = ("table2-1", "table2-4")
ORDERS = "blend,blend:2048,dfs,random"
PARTS = (
    "smoke",
    "ceilings",
    "kernels",
    "layers",
    "steps",
    "sampling",
    "mixed",
    *MIXES,
    "strategies",
    "peer",
    "weights",
    "ranks",
    "full",
)


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description="Measure the engine on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N (cuda)")
    parser.add_argument("--traces", default=os.environ.get("LLMBATCH_TRACES"), help="folder ($LLMBATCH_TRACES)")
    parser.add_argument("--orders", default=ORDERS, help=f"of whole jobs ({ORDERS})")
    parser.add_argument("--layers", type=int, help="of the model (32)")
    parser.add_argument("--rows", type=int, help="of whole jobs (2000)")
    parser.add_argument("--pool-tokens", type=int, help="of whole jobs, at most (all that the card has room for)")
    parser.add_argument("--runs", type=int, help="of each step and kernel, three times (10)")
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
    from gpu.harness.stage import DRY, FULL, Stage
    from gpu.kernels import PAGE

    asked = {"requests": given.rows, "pool": given.pool_tokens and given.pool_tokens // PAGE, "runs": given.runs}
    sizes = replace(DRY if given.dry_run else FULL, **{name: value for name, value in asked.items() if value})
    if given.layers:
        sizes = replace(sizes, model=sizes.model | {"num_hidden_layers": given.layers})
    stage = Stage(given.device, dry=given.dry_run, traces=given.traces, sizes=sizes)
    failed = False
    for name in given.parts or PARTS:
        try:
            run(name, stage, given.orders.split(","), None if given.dry_run else given.out)
        except Exception:
            failed = True
            print(f"{name} failed:", flush=True)
            traceback.print_exc()
    return int(failed)


def run(name: str, stage: Any, orders: list[str], out: Path | None) -> None:
    """Run a part: print each of its results, and write it into a folder if there is one."""
    from gpu.harness.pictures import draw

    module = import_module("gpu.jobs" if name in MIXES else f"gpu.{name}")
    found = {}
    for key, value in module.measure(stage, name, orders) if name in MIXES else module.measure(stage):
        print(f"{name}, {key}: {json.dumps(value)}", flush=True)
        found[key] = value
        if out is not None:
            told = json.dumps(stage.identity() | {"part": name, "result": found}, indent=1)
            write(out, {f"{name}.json": told + "\n"})
    pictures = draw(name, found)
    if out is not None:
        write(out, pictures)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into the folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
