"""Compiled code is kept where there is room for it, and removed where nobody uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmbatch.compilation import decorators
from llmbatch.compilation.decorators import kept
from tests.support.paths import ROOT

DAY = 86_400.0


def folder(root: Path, name: str, days: float) -> Path:
    """A folder with compiled code that was last used so long ago."""
    made = root / name
    made.mkdir()
    (made / "code.nbc").touch()
    then = time.time() - days * DAY
    os.utime(made, (then, then))
    return made


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this version's code is to be."""
    monkeypatch.setattr(decorators, "code_folder", lambda: tmp_path / "00000000deadbeef")
    return tmp_path / "00000000deadbeef"


def test_code_is_named_by_every_file_that_writes_instructions() -> None:
    kernels = Path(decorators.__file__).parents[1] / "kernels" / "cpu"
    for name in ("tiles/vector_ir", "tiles/dot_tiles", "pointers", "products"):
        assert any(mark in (kernels / f"{name}.py").read_bytes() for mark in decorators._MARKS), name


def test_who_makes_a_folder_removes_those_that_nobody_has_used_for_a_month(own: Path) -> None:
    old, left = folder(own.parent, "0123456789abcdef", 31), folder(own.parent, ".0123456789abcde0.17", 31)
    recent, other = folder(own.parent, "fedcba9876543210", 29), folder(own.parent, "of-somebody-else", 99)
    assert kept.__wrapped__()
    assert (old.exists(), left.exists(), recent.exists(), other.exists()) == (False, False, True, True)
    assert sorted(path.name for path in own.parent.iterdir()) == [own.name, recent.name, other.name]


def test_a_folder_that_is_used_stays(own: Path) -> None:
    own.mkdir()
    old, used = folder(own.parent, "0123456789abcdef", 31), own
    os.utime(used, (0, 0))
    assert kept.__wrapped__()
    assert time.time() - used.stat().st_mtime < DAY
    assert old.exists()  # nothing is removed where nothing is made


def test_a_process_makes_its_folder_again_that_was_removed(own: Path) -> None:
    locator = decorators._Locator(kept.__wrapped__, decorators.__file__)
    locator.ensure_cache_path()
    assert own.is_dir()


SUMS = """
from llmbatch.compilation.decorators import compiled

@compiled
def plus(a, b):
    return a + b

@compiled
def minus(a, b):
    return a - b
"""
FULL = """
import resource
import sums
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as where a disk is full, for this process alone
print(sums.plus(3, 4), sums.minus(9, 4))
"""


def test_code_for_which_the_disk_has_no_room_is_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "code"), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", FULL], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "7 5\n"
    assert done.stderr.startswith("compiled code cannot be kept, every job compiles it anew: ")
    assert done.stderr.endswith(": File too large\n")
    assert done.stderr.count("\n") == 1
