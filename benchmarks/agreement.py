"""How often bfloat16 answers are those of float32, on the first rows of the demo dataset.

    python benchmarks/agreement.py [--rows 60]

Greedy answers of the two differ where two tokens are nearly equally likely, and from there on. Printed by kind of
row: equal answers, and the share of the float32 answer's characters that come before the first difference.
"""

from __future__ import annotations

import argparse
import sys
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmbatch import LLMOperator

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "demo"))

from run import DATA, KINDS, SYSTEM, smollm2


def answers(table: pa.Table, dtype: str) -> pa.Table:
    """The table with its answers, in one type of weights and KV."""
    operator = LLMOperator(
        model=str(smollm2()),
        prompt="prompt",
        chat=True,
        system=SYSTEM,
        sampling_params="sampling",
        dtype=dtype,
        kv_memory=2**31,
    )
    return operator(table)


def main() -> None:
    """Answer the rows in both types and print the rates."""
    parser = argparse.ArgumentParser(description="Measure agreement of bfloat16 with float32.")
    parser.add_argument("--rows", type=int, default=60)
    table = pq.read_table(DATA).slice(0, parser.parse_args().rows)
    exact, rounded = (answers(table, dtype)["generated_text"] for dtype in ("float32", "bfloat16"))
    for kind in KINDS:
        of_kind = pc.equal(table["kind"], kind)
        pairs = list(zip(exact.filter(of_kind).to_pylist(), rounded.filter(of_kind).to_pylist(), strict=True))
        equal = sum(one == other for one, other in pairs)
        kept = sum(
            1 for pair in pairs for _ in takewhile(lambda same: same[0] == same[1], zip(*pair, strict=False))
        ) / max(1, sum(len(one) for one, _ in pairs))
        print(f"{kind:8} {equal} of {len(pairs)} answers equal, {kept:.1%} of the characters before a difference")


if __name__ == "__main__":
    main()
