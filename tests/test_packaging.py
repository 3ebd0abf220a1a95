"""What is shipped: packages, public names, light imports, and the demo's dataset."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from setuptools import find_packages

import llmbatch
from tests.support.paths import ROOT

DEMO = ROOT / "examples" / "demo"
HEAVY = {"torch", "ray", "polars", "transformers"}
PLANNING = (
    "llmbatch.planning.prefix_tree",
    "llmbatch.planning.lengths",
    "llmbatch.perf_model.cost",
    "llmbatch.perf_model.shape",
    "llmbatch.perf_model.hardware",
    "llmbatch.kvcache.page_pool",
    "llmbatch.scheduler.scheduler",
    "llmbatch.engine.base",
    "llmbatch.engine.simulated",
)


def loaded_by(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the program."""
    program = f"{program}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dataset() -> pa.Table:
    return pq.read_table(DEMO / "data")


def test_a_bare_import_loads_nothing_heavy() -> None:
    assert loaded_by("import llmbatch") & HEAVY == set()


def test_errors_and_parameters_load_nothing_heavy() -> None:
    assert loaded_by("import llmbatch\nllmbatch.SamplingParams(max_tokens=1)\nllmbatch.DataError") & HEAVY == set()


def test_planning_and_scheduling_load_neither_torch_nor_ray() -> None:
    program = "\n".join(f"import {module}" for module in PLANNING)
    assert loaded_by(program) & {"torch", "ray"} == set()


@pytest.mark.parametrize("name", llmbatch.__all__)
def test_every_public_name_is_importable(name: str) -> None:
    assert getattr(llmbatch, name) is not None


def test_the_lazy_names_are_the_public_ones() -> None:
    assert {*llmbatch._HOME, "__version__"} == set(llmbatch.__all__)


def test_dir_lists_the_public_names() -> None:
    assert dir(llmbatch) == sorted(llmbatch.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'llmbatch' has no attribute 'Operator'$"):
        llmbatch.Operator  # noqa: B018


@pytest.mark.parametrize("name", ["llmbatch.operators", "llmbatch.kernels"])
def test_the_folders_beside_the_package_are_imported_below_it(name: str) -> None:
    package = import_module(name)
    assert package.__name__ == name
    assert package.__file__ is not None
    assert Path(package.__file__).resolve() == ROOT / name.rpartition(".")[2] / "__init__.py"


def test_every_package_is_shipped(project: dict[str, dict[str, Any]]) -> None:
    folders = [ROOT / "llmbatch", ROOT / "operators", ROOT / "kernels"]
    found = [file.parent.relative_to(ROOT) for folder in folders for file in folder.rglob("__init__.py")]
    names = {".".join(("llmbatch", *(part for part in folder.parts if part != "llmbatch"))) for folder in found}
    assert names == set(find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"]))


def test_only_llmbatch_is_installed() -> None:
    assert metadata.distribution("llmbatch").read_text("top_level.txt") == "llmbatch\n"


def test_the_version_is_the_same_everywhere(project: dict[str, dict[str, object]]) -> None:
    assert project["project"]["version"] == llmbatch.__version__ == metadata.version("llmbatch")


def test_the_command_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="llmbatch")
    assert script.value == "llmbatch.__main__:command"


def test_the_type_marker_is_shipped() -> None:
    assert (resources.files("llmbatch") / "py.typed").is_file()


def test_the_demo_dataset_is_small_and_large_enough(dataset: pa.Table) -> None:
    assert dataset.num_rows >= 300
    assert sum(file.stat().st_size for file in (DEMO / "data").iterdir()) < 300_000


@pytest.mark.parametrize("column", ["id", "prompt"])
def test_the_demo_dataset_has_no_duplicates(dataset: pa.Table, column: str) -> None:
    assert len(dataset[column].unique()) == dataset.num_rows


def test_the_demo_dataset_mixes_its_kinds_throughout(dataset: pa.Table) -> None:
    size = dataset.num_rows // 8
    for start in range(0, size * 8, size):
        assert set(dataset["kind"].slice(start, size).to_pylist()) == {"choice", "chat", "long"}


def test_the_demo_dataset_limits_answers_by_kind(dataset: pa.Table) -> None:
    limits: dict[str, set[int]] = {}
    for kind, sampling in zip(dataset["kind"].to_pylist(), dataset["sampling"].to_pylist(), strict=True):
        limits.setdefault(kind, set()).add(sampling["max_tokens"])
    assert limits["choice"] == {2}
    assert max(limits["chat"]) < min(limits["long"])


def test_the_demo_dataset_is_what_its_script_makes(dataset: pa.Table) -> None:
    assert runpy.run_path(str(DEMO / "make_dataset.py"))["dataset"]().equals(dataset)


def test_each_choice_prompt_names_the_right_answer_once_among_its_options(dataset: pa.Table) -> None:
    rows = [row for row in dataset.select(["kind", "prompt", "answer"]).to_pylist() if row["kind"] == "choice"]
    for row in rows:
        asked = row["prompt"].rpartition("Question: ")[2].splitlines()
        options = {line[0]: line[3:] for line in asked[1:-1]}
        assert list(options) == list("ABCD")
        assert len(set(options.values())) == 4
        assert row["answer"] in options


def test_what_torch_is_told_to_import_is_there_and_light(project: dict[str, Any]) -> None:
    (target,) = project["project"]["entry-points"]["torch.backends"].values()
    module, _, name = target.partition(":")
    assert loaded_by(f"import {module}\n{module}.{name}()") & HEAVY == set()
