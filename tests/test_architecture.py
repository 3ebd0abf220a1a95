"""How the house is laid out: strict layers, small rooms, and what each package lets upper layers use."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDERS = ("llmbatch", "operators", "kernels")
MODULES = sorted(
    file
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
    if not (ROOT / "llmbatch" / "operators" in file.parents or ROOT / "llmbatch" / "kernels" in file.parents)
)
MOST_MODULES = 16  # in a folder
MOST_LINES = 340  # in a module
MOST_LINES_OF_A_FUNCTION = 60  # its docstring left out
LONGER = {"attend_item"}  # one kernel: its tiles stay in registers from the first line to the last


def name_of(file: Path) -> str:
    """The dotted name that a file is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "llmbatch" else ("llmbatch", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(file): file for file in MODULES}
PACKAGES = sorted(name for name, file in NAMES.items() if file.name == "__init__.py" and name != "llmbatch")


@cache
def parsed(file: Path) -> ast.Module:
    """A file's tree."""
    return ast.parse(file.read_text())


@cache
def imports_of(file: Path) -> frozenset[str]:
    """The modules of llmbatch that a file imports, wherever in it."""
    imported = set[str]()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            wholes = (f"{node.module}.{name.name}" for name in node.names)
            imported.update(whole if whole in NAMES else node.module for whole in wholes)
        elif isinstance(node, ast.Import):
            imported.update(name.name for name in node.names)
    return frozenset(imported)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as `make lint` checks it: in one folder, without links."""
    shutil.copytree(ROOT / "llmbatch", tmp_path / "llmbatch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the package in a folder."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_layers_hold(copy: Path) -> None:
    done = contracts(copy)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("Contracts: 5 kept, 0 broken.")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("storage/journal.py", "import llmbatch.jobs.job"),
        ("perf_model/cost.py", "import llmbatch.storage.journal"),  # a neighbour
        ("planning/plan.py", "import torch"),
        ("engine/cpu/engine.py", "import llmbatch.engine.gpu.engine"),
    ],
)
def test_an_import_that_runs_up_breaks_the_contract(copy: Path, module: str, line: str) -> None:
    with (copy / "llmbatch" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = contracts(copy)
    assert done.returncode == 1
    assert f"-> {line.split()[1]} (l." in done.stdout


def test_a_module_without_a_layer_breaks_the_contract(copy: Path) -> None:
    (copy / "llmbatch" / "helpers.py").write_text('"""Of no layer."""\n')
    done = contracts(copy)
    assert done.returncode == 1
    assert "helpers" in done.stdout


def test_no_contract_has_an_exception() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("folder", sorted({file.parent for file in MODULES}), ids=str)
def test_no_folder_is_crowded(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) - 1 <= MOST_MODULES


@pytest.mark.parametrize("name", NAMES)
def test_no_module_is_long(name: str) -> None:
    assert len(NAMES[name].read_text().splitlines()) <= MOST_LINES


def test_no_function_is_long() -> None:
    long = set()
    for file in MODULES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                said = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
                if (node.end_lineno or 0) - node.lineno + 1 - said > MOST_LINES_OF_A_FUNCTION:
                    long.add(node.name)
    assert long == LONGER


def test_what_is_not_formatted_says_why() -> None:
    lines = [line for file in MODULES for line in file.read_text().splitlines() if "# fmt: skip" in line]
    assert [line for line in lines if not re.search(r"# fmt: skip  # \w", line)] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_does_and_where_to_start(name: str) -> None:
    said = import_module(name).__doc__
    assert said is not None
    first, empty, bound, start = said.strip().split("\n")
    assert first.endswith(".")
    assert empty == ""
    assert bound.endswith(".")
    assert start.startswith("Start reading at `")


@pytest.mark.parametrize("name", PACKAGES)
def test_upper_layers_use_what_a_package_lists(name: str) -> None:
    listed = {f"{name}.{entry}" for entry in import_module(name).__all__}
    used = {
        imported
        for user, file in NAMES.items()
        if user not in ("llmbatch", name) and not user.startswith(f"{name}.")
        for imported in imports_of(file)
        if imported.startswith(f"{name}.") and imported.count(".") == name.count(".") + 1
    }
    assert used <= listed


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, file in NAMES.items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {cls: names for cls, names in homes.items() if len(names) > 1} == {}
