"""The files that hold a model's weights are those that transformers reads, whatever lies beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmbatch.engine.weights.weight_files import weight_files
from llmbatch.errors import ModelError

INDEX = "model.safetensors.index.json"


def folder_of(tmp_path: Path, *names: str, index: object = None) -> Path:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def names_of(folder: Path) -> list[str]:
    return [file.name for file in weight_files(folder)]


def test_one_file_is_enough_though_others_lie_beside_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "model.safetensors", "zz_adapter.safetensors", index={"weight_map": {"a": "b"}})
    assert names_of(folder) == ["model.safetensors"]


def test_an_index_names_its_shards_and_not_those_of_an_earlier_download(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2-of-2.safetensors", "b": "model-1-of-2.safetensors"}}
    shards = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    folder = folder_of(tmp_path, *shards, "model-1-of-3.safetensors", index=index)
    assert names_of(folder) == list(shards)


def test_without_an_index_all_are_taken(tmp_path: Path) -> None:
    assert names_of(folder_of(tmp_path, "b.safetensors", "a.safetensors")) == ["a.safetensors", "b.safetensors"]
    assert names_of(folder_of(tmp_path / "..")) == []


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "1.safetensors", index={"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    said = f"model folder {str(folder)!r} must have all files that {INDEX} names, and 2.safetensors is not there"
    with pytest.raises(ModelError, match=f"^{re.escape(said)}: complete it$"):
        weight_files(folder)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": ["a"]}, {"weight_map": {"a": {}}}, {"weight_map": {"a": 1}}, {"weight_map": {}}]
)
def test_an_index_that_says_something_else_is_told(tmp_path: Path, index: object) -> None:
    folder = folder_of(tmp_path, index=index)
    said = f"{INDEX} in model folder {str(folder)!r} must name the file of each weight, and cannot be read: "
    with pytest.raises(ModelError, match=f"^{re.escape(said)}copy or download it again$"):
        weight_files(folder)
