"""Write what docs/architecture.md lists from the code itself: layers, folders and modules.

    python docs/make_tables.py

The layers are those of the import contract in pyproject.toml; the sentences are the first ones of docstrings.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"


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


def layers() -> str:
    """Draw the layers of the import contracts, upper ones first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    drawn = [f"# {c['containers'][0]}\n" + "\n".join(c["layers"]) for c in contracts if c["type"] == "layers"]
    return "```\n" + "\n\n".join(drawn) + "\n```"


def folders() -> str:
    """List the packages, each with what it does."""
    packages = [file for file in sources() if file.name == "__init__.py" and package_of(file) != "llmbatch"]
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


PARTS: dict[str, Callable[[], str]] = {"layers": layers, "folders": folders, "modules": modules}


def fill(page: str) -> str:
    """Put each list between its two markers."""
    for name, make in PARTS.items():
        start, end = f"<!-- {name}: written by docs/make_tables.py -->\n", f"\n<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + make() + end + rest.split(end, 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
