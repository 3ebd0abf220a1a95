"""Options of workers that plan a job of others and compute nothing of it, and what a plan of devices decides."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from llmbatch.arguments import refusal
from llmbatch.choices import DType, KVDType
from llmbatch.errors import ParameterError
from llmbatch.inference.options import Options

_PLENTY: Final = 1 << 50  # bytes of KV, where nothing is kept
_DECIDED: Final = ("tensor_parallel", "kv", "weights", "weights_memory")


def outliner_options(options: Options) -> Options:
    """Return the same options for processes that read prompts alone: for most models these import no torch.

    The memory of such a process says nothing of the job's, and no row is refused by it.
    """
    given: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "kv_memory": _PLENTY}
    return replace(_on_a_processor(options), engine="simulated", **given)


def planner_options(options: Options) -> Options:
    """Return the same options for processes that compute nothing, and may have no GPU or should leave it to others."""
    if options.device == "cpu":
        return options
    dtype: DType = "bfloat16" if options.dtype in ("float16", "fp8") else options.dtype
    kv: KVDType = "auto" if options.kv_cache_dtype == "fp8" else options.kv_cache_dtype
    return replace(_on_a_processor(options), dtype=dtype, kv_cache_dtype=kv)


def check_undecided(options: Options) -> None:
    """Refuse what a plan decides, and jobs that have no devices to plan for. Raises ParameterError."""
    if options.beside:
        raise _no_devices("where endpoints answer, which have devices of their own")
    if options.engine != "torch":
        raise _no_devices(f"for engine={options.engine!r}, which has no devices")
    plain = {field.name: field.default for field in fields(options)}
    for name in _DECIDED:
        if getattr(options, name) != plain[name]:
            raise refusal(name, "be left out where plan is auto, which decides it", getattr(options, name))


def _no_devices(where: str) -> ParameterError:
    return ParameterError(f"plan must be 'given' {where}, got 'auto': leave plan out", option="plan", value="auto")


def _on_a_processor(options: Options) -> Options:
    """Return the same options without what only a GPU, or an engine that computes, can be asked."""
    return replace(options, device="cpu", kv="device", weights="auto", weights_memory=None, tensor_parallel=1)
