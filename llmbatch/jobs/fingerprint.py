"""What decides the answers of a job, in a form that is kept beside them and compared with a later command.

How a job is run (order, memory, pages, windows, limits of errors) is not part of it: that may change on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from llmbatch.inference.options import Options


def fingerprint(options: Options, *, model_files: str, id_column: str | None) -> dict[str, Any]:
    """What decides the answers, as JSON values; `model_files` is a digest of the model's files."""
    return {
        "model_files": model_files,
        **asdict(options.source),
        **asdict(options.sampling),
        "stop": list(options.sampling.stop),
        "sampling_params": options.sampling_column,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "engine": options.engine,
        "output_tokens": options.output_tokens,
        "id_column": id_column,
    }


def difference(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What is not the same in two commands, in words; None where all is."""
    changed = [name for name in now if kept.get(name) != now[name]]
    if not changed:
        return None
    if changed == ["model_files"]:
        return "the files of the model were others"
    names = [name for name in changed if name != "model_files"]
    told = " and ".join(f"{name} was {kept.get(name)!r} and is {now[name]!r}" for name in names)
    return told + (", and the files of the model were others" if len(names) < len(changed) else "")
