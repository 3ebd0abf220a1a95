"""Which files of a model's folder hold its weights, as transformers finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from llmbatch.errors import ModelError

_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """List the .safetensors files of a model: one, or those that an index names, or else all; none where none is there.

    Others may lie beside them: shards of an earlier download, or adapters. Raises ModelError where one is missing.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not (folder / _INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{_INDEX} in model folder {str(folder)!r} must name the file of each weight, and cannot be read: copy or "
            "download it again"
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"model folder {str(folder)!r} must have all files that {_INDEX} names, and {missing[0]} is not there: "
            "complete it"
        )
    return [folder / name for name in names]
