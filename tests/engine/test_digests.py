"""A model is known by its whole content, which is read once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmbatch.engine.model import digests as module
from llmbatch.engine.model.checkpoints import model_digest
from llmbatch.engine.model.digests import digest

LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of more than ten bytes are large, and those written this moment will not be written again within it."""
    monkeypatch.setattr(module, "_SMALL", 10)
    monkeypatch.setattr(module, "_SETTLED", -1.0)
    monkeypatch.setenv("LLMBATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(bytes(5_000_000))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read in full."""
    read: list[str] = []
    original: Callable[[Path, Path], str] = module._hash

    def noting(path: Path, cache: Path) -> str:
        read.append(path.name)
        return original(path, cache)

    monkeypatch.setattr(module, "_hash", noting)
    return read


def change(path: Path, at: int) -> None:
    """Another byte, and all that anybody can set as before."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 2_500_000, 4_999_999])
def test_a_byte_anywhere_makes_another_model(file: Path, at: int) -> None:
    before = model_digest(str(file.parent))
    assert model_digest(str(file.parent)) == before
    change(file, at)
    assert model_digest(str(file.parent)) != before


def test_another_name_or_another_file_makes_another_model(file: Path) -> None:
    before = model_digest(str(file.parent))
    (file.parent / "config.json").write_text("{}")
    assert model_digest(str(file.parent)) != before


def test_a_file_is_read_once(file: Path, hashed: list[str]) -> None:
    assert model_digest(str(file.parent)) == model_digest(str(file.parent))
    assert hashed == ["model.safetensors"]


def test_a_file_that_may_still_be_written_is_read_again(
    file: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED", 1e6)
    assert model_digest(str(file.parent)) == model_digest(str(file.parent))
    assert len(hashed) == 2


@pytest.mark.parametrize("kept", [b"", b"[]", b'{"state": []}'])
def test_a_damaged_note_is_made_anew(file: Path, tmp_path: Path, kept: bytes, hashed: list[str]) -> None:
    before = digest(file, tmp_path / "cache")
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    note.write_bytes(kept)
    assert digest(file, tmp_path / "cache") == before
    assert len(hashed) == 2


def test_a_cache_that_cannot_be_written_is_done_without(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert model_digest(str(file.parent)) == model_digest(str(file.parent))


def test_a_blob_of_the_hub_has_its_name_already(tmp_path: Path, hashed: list[str]) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / ("0123456789abcdef" * 4)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1" / "model.safetensors"
    for path in (blob, snapshot):
        path.parent.mkdir(parents=True)
    blob.write_bytes(bytes(100))
    snapshot.symlink_to(blob)
    assert digest(snapshot, tmp_path / "cache") == blob.name
    assert hashed == []
