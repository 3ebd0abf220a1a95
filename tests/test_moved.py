"""Old import paths say where a module is now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

import llmbatch
from llmbatch._moved import MOVED, MovedModules
from tests.support.paths import ROOT

MODULES = sorted(MOVED.keys() - {"engines", "storage.Place"})


@pytest.mark.parametrize("old", MODULES)
def test_an_old_path_says_where_the_module_is_now(old: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module(f"llmbatch.{old}")
    assert str(caught.value) == f"llmbatch.{old} is now llmbatch.{MOVED[old]}"
    assert find_spec(f"llmbatch.{MOVED[old]}") is not None


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from llmbatch import cost", "llmbatch.cost is now llmbatch.perf_model.cost"),
        (
            "from llmbatch.sampling import SamplingParams",
            "llmbatch.sampling is now llmbatch.preprocess.sampling_params",
        ),
        ("from llmbatch.engines import torch", "llmbatch.engines.torch is now llmbatch.engine.cpu.engine"),
        ("from llmbatch.engines import Step", "llmbatch.engines is now llmbatch.engine"),
        ("from llmbatch.storage import Place", "llmbatch.storage.Place is now llmbatch.storage.location.Location"),
        ("import llmbatch.nowhere", "No module named 'llmbatch.nowhere'"),
    ],
)
def test_every_form_of_import_is_told(statement: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(statement)
    assert str(caught.value) == said


def test_an_attribute_of_an_old_name_is_told_and_may_be_asked_for() -> None:
    with pytest.raises(AttributeError, match=r"^llmbatch\.cost is now llmbatch\.perf_model\.cost$"):
        llmbatch.cost  # noqa: B018
    assert not hasattr(llmbatch, "cost")


def test_the_finder_is_asked_last_once_and_for_names_of_llmbatch_alone() -> None:
    program = "import sys\nbefore = list(sys.meta_path)\nimport llmbatch, importlib\nimportlib.reload(llmbatch)\n"
    program += "assert sys.meta_path[1:-1] == before, sys.meta_path  # the first one is that of frames"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert MovedModules().find_spec("cost") is None
    assert MovedModules().find_spec("llmbatch.errors") is None
    assert MovedModules().find_spec("other.cost") is None
