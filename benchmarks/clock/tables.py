"""The results in docs/results as Markdown tables: writes docs/results/tables.md.

    python benchmarks/clock/tables.py

Reads what policies.py, kinds.py, replicas.py and sensitivity.py wrote; a table whose file is missing is left out. An
order that was compared alone (`policies.py TABLE --baseline ORDER`) gets a table after that of its mixes.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from harness.simulations import RESULTS, TABLE2, baseline, blend, gain

TITLES = {
    "table2": "Table 2's mixes (azure2023_code, mmlu_5shot, video_panda70m), Llama-3-8B on an A100-80GB",
    "bytes": "The same under law `bytes`",
    "draws": "Other draws of the same mixes, `blend`",
    "heldout": "Draws of seeds that no constant was tuned on (41 to 45), `blend`, both laws",
    "plain": "Table 2 without the system prompt of each source, `blend`",
    "wide": "`wide-1`",
    "sharegpt": "ShareGPT as the compute-heavy source",
    "azure": "Azure's conversations as the compute-heavy source",
    "models": "Other models, each mix drawn for the model",
    "exponents": "Other laws of overlap",
}
SPREAD = ("draws", "heldout", "plain", "sharegpt", "models")  # tables summed up before they are shown


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def read(name: str) -> list[dict[str, Any]] | None:
    """The results of a script, None where it has not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def command(name: str, results: list[dict[str, Any]], option: str = "") -> str:
    """What wrote a table of policies."""
    return f"`python benchmarks/clock/policies.py {name} --requests {results[0]['setting']['requests']}{option}`"


def alone(name: str, title: str) -> Iterable[str]:
    """The orders that were compared alone on the mixes of a table."""
    for order in sorted(path.stem.removeprefix(f"{name}-") for path in RESULTS.glob(f"{name}-*.json")):
        results = read(f"{name}-{order}") or []
        written_by = command(name, results, f" --baseline {order}")
        yield f"## {title}: `{order}`\n\n{written_by}\n\n{policies(results)}"


def policies(results: list[dict[str, Any]]) -> str:
    """A row a mix: fractions of the optimum, and gains in seconds."""
    first = results[0]["setting"]
    orders = first["baselines"]
    header = ["mix", *(f"{knowledge}" for knowledge in first["knowledge"]), "sharing of possible"]
    plain = {order: 2048 in budgets for order, budgets in orders.items()}
    for order in orders:
        header += [f"{order} at 2,048", "gain"] * plain[order] + [f"best {order}", "gain"]
    rows = []
    for result in results:
        setting, run = result["setting"], blend(result)
        name = setting["mix"] + (f", seed {setting['seed']}" if setting["seed"] else "")
        if setting["model_shape"] != "llama-3-8b":
            name = f"{setting['model_shape']} x {setting['tensor_parallel']}, {name}"
        if first["law"] != results[-1]["setting"]["law"] and setting["overlap_exponent"] == 4.0:
            name = f"{setting['law']}, {name}"
        if setting["overlap_exponent"] != 4.0:
            name = f"{setting['law']}, e = {setting['overlap_exponent']:g}, {name}"
        row = [name, *(f"{blend(result, knowledge)['fraction_of_optimal']:.3f}" for knowledge in setting["knowledge"])]
        row.append(f"{run['prefix_sharing'] / run['prefix_sharing_optimal']:.3f}")
        for order in orders:
            if plain[order]:
                run = baseline(result, order, 2048)
                row += [f"{run['fraction_of_optimal']:.3f}", f"{gain(result, order, 2048):.2f}"]
            run = baseline(result, order)
            place = f"{run['step_tokens']:,}{' reversed' if run['backwards'] else ''}"
            row += [f"{run['fraction_of_optimal']:.3f} ({place})", f"{gain(result, order):.2f}"]
        rows.append(row)
    return table(header, rows)


def headline(paper: list[dict[str, Any]], bytes_: list[dict[str, Any]]) -> str:
    """`blend` by mix under both laws, lengths known and sampled, side by side."""
    rows = []
    for under in zip(paper, bytes_, strict=True):
        runs = [blend(result, knowledge) for result in under for knowledge in ("known", "sampled")]
        rows.append([under[0]["setting"]["mix"], *(f"{run['fraction_of_optimal']:.3f}" for run in runs)])
    return table(["mix", "paper, known", "paper, sampled", "bytes, known", "bytes, sampled"], rows)


def spread(results: list[dict[str, Any]]) -> str:
    """The mean and the least over mixes and seeds, by law and by what is known of lengths."""
    rows = []
    for law in dict.fromkeys(result["setting"]["law"] for result in results):
        for knowledge in results[0]["setting"]["knowledge"]:
            values = [
                blend(result, knowledge)["fraction_of_optimal"] for result in results if result["setting"]["law"] == law
            ]
            rows.append([law, knowledge, len(values), f"{np.mean(values):.3f}", f"{min(values):.3f}"])
    return table(["law", "lengths", "draws", "mean", "least"], rows)


def kinds(results: list[dict[str, Any]]) -> str:
    """A row a case: `blend` with lengths sampled, and the best fixed budget in the input's order."""
    rows = [
        [
            result["case"],
            result["cap"] or "none",
            f"{result['density']:.2g}",
            f"{result['blend']:.3f}",
            f"{result['best']:.3f} ({result['best_tokens']:,})",
            f"{result['blend'] / result['best']:.3f}",
        ]
        for result in results
    ]
    return table(["rows", "cap", "density", "sampled", "best fixed budget", "over it"], rows)


def grid(results: list[dict[str, Any]]) -> str:
    """Gains over density and sharing, and their least, mean and most."""
    parts = []
    for order in ("dfs", "random"):
        gains = {result["setting"]["mix"]: gain(result, order) for result in results}
        densities, sharings = (list(dict.fromkeys(mix.split(",")[axis] for mix in gains)) for axis in (0, 1))
        values = np.array(list(gains.values()))
        parts.append(
            f"`blend` over the best {order}: least {values.min():.2f}, mean {values.mean():.2f}, most "
            f"{values.max():.2f}.\n\n"
            + table(
                ["sharing \\ density", *densities],
                [[s, *(f"{gains[f'{d},{s}']:.2f}" for d in densities)] for s in sharings],
            )
        )
    fractions = [blend(result)["fraction_of_optimal"] for result in results]
    parts.append(
        f"`blend`, lengths known, of the optimum: least {min(fractions):.3f}, mean {np.mean(fractions):.3f}.\n"
    )
    return "\n".join(parts)


def replicas(results: list[dict[str, Any]]) -> str:
    """A row a mix and a number of devices."""
    rows = []
    for result in results:
        alone = result["runs"][0]["tokens_per_second"]
        for run in result["runs"]:
            seconds = run["replica_seconds"] or [run["seconds"]]
            rows.append(
                [
                    result["mix"],
                    run["replicas"],
                    f"{run['tokens_per_second']:,.0f}",
                    f"{run['tokens_per_second'] / alone:.2f}",
                    f"{max(seconds) * len(seconds) / sum(seconds):.3f}",
                    f"{run['planning_seconds']:.1f}",
                ]
            )
    return table(["mix", "devices", "tokens/s", "over one", "slowest / mean", "planning, s"], rows)


def sensitivity(results: list[dict[str, Any]]) -> str:
    """A row a value of a constant."""
    return table(
        ["lengths", "law", "constant", "value", *TABLE2],
        (
            [
                result["lengths"],
                result["law"],
                "as it is" if result["constant"] is None else f"`{result['constant']}`",
                "" if result["constant"] is None else f"{result['value']:g}",
                *(f"{fraction:.3f}" for fraction in result["fractions"]),
            ]
            for result in results
        ),
    )


def main() -> None:
    """Write all tables there are results for."""
    parts = [
        "# Simulations: tables\n\nWritten by `python benchmarks/clock/tables.py`; what they mean is in simulated.md.\n"
    ]
    if (paper := read("table2")) and (bytes_ := read("bytes")):
        parts.append(f"## Both laws, both kinds of lengths, of the optimum\n\n{headline(paper, bytes_)}")
    for name, title in TITLES.items():
        if results := read(name):
            summary = f"{spread(results)}\n" if name in SPREAD else ""
            parts.append(f"## {title}\n\n{command(name, results)}\n\n{summary}{policies(results)}")
        parts += alone(name, title)
    if results := read("kinds"):
        parts.append(f"## Caps, and rows of one kind\n\n`python benchmarks/clock/kinds.py`\n\n{kinds(results)}")
    if results := read("grid"):
        parts.append(f"## Density and sharing\n\n{command('grid', results)}\n\n{grid(results)}")
    if results := read("replicas"):
        parts.append(f"## Data parallelism\n\n`python benchmarks/clock/replicas.py`\n\n{replicas(results)}")
    if results := read("sensitivity"):
        written_by = f"`python benchmarks/clock/sensitivity.py --requests {results[0]['requests']}`"
        parts.append(f"## Constants of the scheduler\n\n{written_by}\n\n{sensitivity(results)}")
    (RESULTS / "tables.md").write_text("\n".join(parts))


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    main()
