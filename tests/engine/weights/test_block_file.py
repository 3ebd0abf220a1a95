"""A folder that cannot hold weights is named, with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmbatch.engine.weights.block_file import BlockFile, disk_rate
from llmbatch.engine.weights.mapped import MappedWeights
from llmbatch.errors import JobError

WAY_OUT = "free room there, or name a folder on a larger disk in LLMBATCH_CACHE"


def test_a_file_where_the_folder_should_be_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "weights"
    folder.parent.write_text("")
    said = f"weights that memory does not hold cannot be written to {str(folder)!r} ([Errno 20] Not a directory: "
    with pytest.raises(JobError, match=f"^{re.escape(said)}.*{re.escape(WAY_OUT)}$"):
        BlockFile(folder)


def test_it_is_said_of_weights_that_are_converted(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    folder = tmp_path / "cache" / "weights"
    folder.parent.write_text("")
    with pytest.raises(JobError, match=f"^weights that are converted cannot be written to .*{re.escape(WAY_OUT)}$"):
        MappedWeights(tmp_path, torch.bfloat16, folder)


def test_the_rate_of_a_disk_takes_no_more_room_than_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    append = BlockFile.append

    def noted(self: BlockFile, arrays: list[object]) -> object:
        written.append(sum(array.nbytes for array in arrays))  # type: ignore[attr-defined]
        return append(self, arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFile, "append", noted)
    assert disk_rate(tmp_path, 1000) > 0
    assert written == [1000]
