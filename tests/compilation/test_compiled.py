"""Compiled code that nobody uses is removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from llmbatch.compilation import decorators
from llmbatch.compilation.decorators import kept

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
