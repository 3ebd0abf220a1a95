"""The options that determine the answers of a job, kept with them and compared with a later command.

Options of how a job is run (order, memory, pages, windows, limits of errors) are not part of it: they may change on the
way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from llmbatch.inference.options import Options
from llmbatch.preprocess.sampling_params import SamplingParams

_ALWAYS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")


def fingerprint(
    options: Options, *, model_files: str, id_column: str | None, form: str | None = None
) -> dict[str, Any]:
    """Collect the options that determine the answers, as JSON values; `model_files` digests the model's files."""
    return {
        "model_files": model_files,
        **asdict(options.source),
        **_sampling(options.sampling),
        "sampling_params": options.sampling_column,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "load_format": options.load_format,
        "context_length": options.context_length,
        "engine": options.engine,
        "output_tokens": options.output_tokens,
        "id_column": id_column,
        **({} if options.continuation is None else {"continuation": options.continuation}),
        **({} if form is None else {"output_format": form}),
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Collect sampling parameters; those that jobs of earlier versions had not are left out where they do nothing."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(params)))
    plain = asdict(SamplingParams())
    return {name: value for name, value in values.items() if name in _ALWAYS or getattr(params, name) != plain[name]}


def difference(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the differences of two commands, in words; None if there are none."""
    changed = [name for name in {**now, **kept} if kept.get(name) != now.get(name)]
    if not changed:
        return None
    if changed == ["model_files"]:
        return "the files of the model were others"
    names = [name for name in changed if name != "model_files"]
    text = " and ".join(f"{name} was {kept.get(name)!r} and is {now.get(name)!r}" for name in names)
    return text + (", and the files of the model were others" if len(names) < len(changed) else "")
