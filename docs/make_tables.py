"""Write the lists of docs/architecture.md, docs/options.md and docs/models.md from the code itself.

    python docs/make_tables.py

The layers are those of the import contract in pyproject.toml, and packages are listed in their order. The sentences
are the first ones of docstrings. The options are those of which the command line makes its flags. The families of
models are those by which the tests of the engine are parametrised.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from llmbatch.choices import Keyword, keywords_of
from llmbatch.inference.keywords import AnswerArgs, BesideArgs, EngineArgs, OptionArgs, PromptArgs
from llmbatch.jobs.options import InputArgs, JobArgs, SearchArgs
from llmbatch.serving.options import ServingArgs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def first_sentence(file: Path) -> str:
    """Read the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def package_of(file: Path) -> str:
    """Name the package of a file as it is imported."""
    parts = file.parent.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "llmbatch" else ("llmbatch", *parts))


def sources() -> list[Path]:
    """Find every module of the package, its two folders at the top included."""
    found = [file for folder in ("llmbatch", "operators", "kernels") for file in (ROOT / folder).rglob("*.py")]
    links = {ROOT / "llmbatch" / "operators", ROOT / "llmbatch" / "kernels"}
    kept = [file for file in found if not links & set(file.parents)]
    return sorted(kept, key=lambda file: (package_of(file), file.name != "__init__.py", file.name))


def contracts() -> dict[str, list[str]]:
    """Read the layers of each package that has a contract for them, upper ones first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["tool"]["importlinter"]["contracts"]
    return {contract["containers"][0]: contract["layers"] for contract in found if contract["type"] == "layers"}


def layers() -> str:
    """Draw the layers of the import contracts, upper ones first."""
    drawn = [f"# {package}\n" + "\n".join(lines) for package, lines in contracts().items()]
    return "```\n" + "\n\n".join(drawn) + "\n```"


def height(package: str) -> list[tuple[int, str]]:
    """Give what packages are sorted by: the line of the package in its contract, and of each that it lies in."""
    found = []
    parts = package.split(".")
    for depth in range(1, len(parts)):
        lines = contracts().get(".".join(parts[:depth]), [])
        on = [line for line, names in enumerate(lines) if parts[depth] in names.split(" | ")]
        found.append((on[0] if on else 0, parts[depth]))
    return found


def folders() -> str:
    """List the packages by layer, each with what it does."""
    packages = [file for file in sources() if file.name == "__init__.py" and package_of(file) != "llmbatch"]
    packages.sort(key=lambda file: height(package_of(file)))
    rows = [f"| `{package_of(file).removeprefix('llmbatch.')}` | {first_sentence(file)} |" for file in packages]
    return "\n".join(["| package | what it does |", "|---|---|", *rows])


def modules() -> str:
    """List the modules by package, each with what it promises."""
    rows = ["| module | what it holds |", "|---|---|"]
    for file in sources():
        if file.name != "__init__.py":
            name = f"{package_of(file)}.{file.stem}".removeprefix("llmbatch.")
            rows.append(f"| `{name}` | {first_sentence(file)} |")
    return "\n".join(rows)


def options(**keywords: tuple[Any, Keyword]) -> str:
    """List keywords, each with its flag, its default and what it does."""
    rows = ["| Python | command line | default | what it does |", "|---|---|---|---|"]
    for name, (kind, keyword) in keywords.items():
        taken = get_args(kind) or (kind,)
        switches_off = bool in taken and keyword.default is True
        flag = f"--{'no-' * switches_off}{name.replace('_', '-')} {keyword.metavar or ''}".strip()
        text = f"`False`: {keyword.help}" if switches_off else keyword.help
        if get_origin(kind) is Literal:
            text += ": " + ", ".join(f"`{value}`" for value in taken)
        rows.append(f"| `{name}` | `{flag}` | {default_of(keyword)} | {text} |")
    return "\n".join(rows)


def default_of(keyword: Keyword) -> str:
    """Write a default as Python spells it, with what it means."""
    shown = "" if keyword.default is None else f"`{keyword.default!r}`".replace("'", '"')
    return ": ".join(part for part in (shown, keyword.means) if part)


def families() -> str:
    """List the families of models that are tested."""
    table = tested()["TABLE"].values()
    rows = ["| models | tested beside that | fused | one loop | KV of one token |", "|---|---|---|---|---|"]
    for family in table:
        loop = "yes" if family.one_loop else ""
        rows.append(f"| {family.models} | {family.tested} | {family.fused} | {loop} | {kv_of(family.known)} |")
    return "\n".join(rows)


def kv_of(known: Any) -> str:
    """Write the KV that a token of a published model takes in bfloat16, and the share of layers with windows."""
    if known is None:
        return ""
    size = known.layers * known.heads * 2 * known.width * 2
    share = f" ({known.windows} of {known.layers} layers)" if known.windows else ""
    return f"{known.name}: {size:,} bytes{share}"


def refused() -> str:
    """List the families of models that are refused, each with its part that is not supported."""
    rows = ["| models | refused for |", "|---|---|"]
    for family in tested()["REFUSED"].values():
        rows.append(f"| {family.models} | {family.refusal.split(', which is not supported: ')[0]} |")
    return "\n".join(rows)


def tested() -> dict[str, Any]:
    """Read the families of the tests, which takes transformers."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return vars(import_module("tests.support.families"))


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {"layers": layers, "folders": folders, "modules": modules},
    "models.md": {"families": families, "refused": refused},
    "options.md": {
        "model": partial(options, model=keywords_of(OptionArgs)["model"]),
        "prompts": partial(options, **keywords_of(PromptArgs)),
        "answers": partial(options, **keywords_of(AnswerArgs)),
        "engine": partial(options, **keywords_of(EngineArgs)),
        "beside": partial(options, **keywords_of(BesideArgs)),
        "job": partial(options, **keywords_of(InputArgs), **keywords_of(JobArgs)),
        "search": partial(options, **keywords_of(SearchArgs)),
        "endpoint": partial(options, **keywords_of(ServingArgs)),
    },
}


def fill(name: str, page: str) -> str:
    """Put each list of a page between its two markers."""
    for part, make in PARTS[name].items():
        start, end = f"<!-- {part}: written by docs/make_tables.py -->\n", f"\n<!-- end of {part} -->"
        before, rest = page.split(start)
        page = before + start + make() + end + rest.split(end, 1)[1]
    return page


if __name__ == "__main__":
    for file in (DOCS / name for name in PARTS):
        file.write_text(fill(file.name, file.read_text(encoding="utf-8")), encoding="utf-8")
