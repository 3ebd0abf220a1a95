"""The engine on a GPU: ceilings, kernels, layers, steps and whole jobs, in parts of a few minutes.

    python benchmarks/gpu [PART ...] [--device cuda] [--traces FOLDER] [--out FOLDER] [--dry-run]

Parts are `ceilings`, `kernels`, `layers`, `steps`, `table2-1`, `table2-4`, `strategies`, `peer` and `full`; without any
all of them run. It needs torch, transformers, triton, numpy, numba and pyarrow, and one NVIDIA GPU. Each part writes
`PART.json` and pictures into the folder, with the card's name, versions, date and ceilings. `--traces`, or
$LLMBATCH_TRACES, is a folder with azure2023_code, mmlu_5shot and video_panda70m as Parquet, which whole jobs need.
`--dry-run` runs everything in sizes that Triton's interpreter can do on a processor: its figures say nothing, and are
not written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
MIXES = ("table2-1", "table2-4")
PARTS = ("ceilings", "kernels", "layers", "steps", *MIXES, "strategies", "peer", "full")


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description="Measure the engine on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N (cuda)")
    parser.add_argument("--traces", default=os.environ.get("LLMBATCH_TRACES"), help="folder ($LLMBATCH_TRACES)")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "results" / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter")
    given = parser.parse_args()
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        parser.error(f"a part must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is made
    # Not this folder itself, whose modules would stand before others of their names.
    sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path) != HERE), str(HERE.parent.parent)]
    from gpu.pictures import draw
    from gpu.stage import Stage

    stage = Stage(given.device, dry=given.dry_run, traces=given.traces)
    for name in given.parts or PARTS:
        if name in MIXES:
            found = import_module("gpu.jobs").measure(stage, name)
        else:
            found = import_module(f"gpu.{name}").measure(stage)
        result = stage.identity() | {"part": name, "result": found}
        print(json.dumps(result, indent=1))
        files = {f"{name}.json": json.dumps(result, indent=1) + "\n"} | draw(name, found)
        if not given.dry_run:
            given.out.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (given.out / file).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
