"""300 rows of SmolLM2 that keep to five JSON schemas: how many are valid, and their speed over free text.

    python benchmarks/engine/structured.py [--rounds 3] [--forced] [--rows 300]

Free text has the same prompts and the same number of tokens in each row. Both run in turns, in one process, after one
round of each that is not counted. Tokens per second are input and output tokens over seconds. A row is valid where
`jsonschema` says so (`pip install jsonschema`). Exit status 1 where a row is not.

`--forced` compares something else: the same rows with the tokens that schemas force taken as they are, and with every
token sampled, in turns; as they stand, and with schemas that allow no white space between tokens of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmbatch import LLMOperator

sys.path.append(str(Path(__file__).parents[2] / "examples" / "demo"))
from run import smollm2

ROWS = 300
MOST = 400  # tokens: more than any of these forms needs


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": _object(person=_object(name=_TEXT, home=_object(city=_TEXT, country=_TEXT))),
    "enums": _object(mood={"enum": ["good", "bad", "neutral"]}, language={"enum": ["English", "French", "German"]}),
    "arrays": _object(tags={"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4}),
    "numbers": _object(
        age={"type": "integer", "minimum": 0, "maximum": 120},
        score={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "optional": {**_object(title=_TEXT, note=_TEXT, done={"type": "boolean"}), "required": ["title"]},
}


def operator(**given: Any) -> Any:
    """An operator on the demo's model."""
    return LLMOperator(model=str(smollm2()), prompt="text", chat=True, sampling_params="sampling", **given)


def rows() -> pa.Table:
    """Prompts, and for each the schema that its answer keeps to."""
    names = list(SCHEMAS)
    texts = [f"Describe item {i}, a thing that one finds at home, as JSON ({names[i % 5]})." for i in range(ROWS)]
    sampling = [
        json.dumps({"max_tokens": MOST, "structured_outputs": {"json": SCHEMAS[names[i % 5]]}}) for i in range(ROWS)
    ]
    return pa.table({"text": texts, "sampling": sampling})


def timed(op: Any, table: pa.Table) -> tuple[pa.Table, float]:
    """Answers, and tokens a second."""
    begun = time.perf_counter()
    answered = op(table)
    seconds = time.perf_counter() - begun
    columns = ("num_input_tokens", "num_generated_tokens")
    return answered, sum(sum(answered[name].to_pylist()) for name in columns) / seconds


def invalid(answered: pa.Table) -> list[str]:
    """Say what is wrong with each row that is not valid."""
    import jsonschema  # type: ignore[import-untyped]

    names, found = list(SCHEMAS), []
    for i, row in enumerate(answered.select(["generated_text", "error"]).to_pylist()):
        try:
            jsonschema.validate(json.loads(row["generated_text"]), SCHEMAS[names[i % 5]])
        except (ValueError, TypeError, jsonschema.ValidationError) as error:
            found.append(f"row {i}: {row['error'] or error}")
    return found


def compact(table: pa.Table) -> pa.Table:
    """The same rows, whose schemas allow no white space."""
    asked = [json.loads(one) for one in table["sampling"].to_pylist()]
    for one in asked:
        one["structured_outputs"]["json"]["x-guidance"] = {"whitespace_flexible": False}
    return table.set_column(1, "sampling", pa.array([json.dumps(one) for one in asked]))


def compare_forced(op: Any, asked: pa.Table, rounds: int) -> int:
    """Print what rows take with forced tokens, and with every token sampled; returns 1 where answers differ."""
    from llmbatch.engine.cpu.engine import CpuEngine
    from llmbatch.engine.grammars import Grammars

    steps, samples = [0], [0]
    execute, forced = CpuEngine.execute, Grammars.forced

    def counted(self: CpuEngine, step: Any) -> Any:
        steps[0] += 1
        samples[0] += int(step.samples.sum())
        return execute(self, step)

    CpuEngine.execute = counted  # type: ignore[method-assign]
    differ = 0
    for name, table in (("as they stand", asked), ("no white space", compact(asked))):
        for number in range(rounds):
            texts = []
            for how, found in (("forced", forced), ("sampled", lambda *_: []))[:: 1 if number % 2 else -1]:
                Grammars.forced = found  # type: ignore[method-assign]
                steps[0] = samples[0] = 0
                begun = time.perf_counter(), time.process_time()
                answered = op(table)
                took = time.perf_counter() - begun[0], time.process_time() - begun[1]
                texts.append(answered["generated_text"].to_pylist())
                tokens = sum(answered["num_generated_tokens"].to_pylist())
                print(
                    f"{name}, {how}: {tokens:,} tokens, {samples[0]:,} samples, {steps[0]} steps, "
                    f"{took[0]:.1f} s, {took[1]:.1f} s of processor time",
                    flush=True,
                )
            differ += sum(one != other for one, other in zip(*texts, strict=True))
    print(f"{differ} answers differ")
    return int(differ > 0)


def main() -> int:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forced", action="store_true", help="compare forced tokens with sampled ones")
    parser.add_argument("--rows", type=int, default=ROWS, help="how many, with --forced")
    given = parser.parse_args()
    rounds = given.rounds
    if given.forced:
        op, asked = operator(dtype="float32"), rows().slice(0, given.rows)
        op(asked.slice(0, 5))
        return compare_forced(op, asked, rounds)
    op, asked = operator(), rows()
    answered, _ = timed(op, asked)
    wrong = invalid(answered)
    lengths = answered["num_generated_tokens"].to_pylist()
    free = asked.set_column(
        1, "sampling", pa.array([json.dumps({"max_tokens": n, "ignore_eos": True}) for n in lengths])
    )
    timed(op, free)
    print(f"{ROWS - len(wrong)} of {ROWS} rows are valid, {sum(lengths):,} tokens; {wrong[:3]}", flush=True)
    ratios = []
    for number in range(rounds):
        speeds = [timed(op, table)[1] for table in ((asked, free) if number % 2 == 0 else (free, asked))]
        formed, plain = speeds if number % 2 == 0 else speeds[::-1]
        ratios.append(formed / plain)
        print(f"round {number}: {formed:8.1f} tokens/s, free text {plain:8.1f}, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
