"""Compiles the kernels of a processor before there is a model to run: here, or in another process."""

from __future__ import annotations

from llmbatch.choices import DType
from llmbatch.inference.options import Options


def _host_type(options: Options) -> DType | None:
    """Return the dtype of what a processor computes of the model, all of it or attention; None where it does not."""
    if options.engine == "simulated":
        return None
    from llmbatch.engine.devices import find_platform

    platform = find_platform(options.device, kv=options.kv)
    if platform.attends_on_host:
        return "float32" if options.dtype == "float32" else "bfloat16"
    return options.dtype if platform.is_host else None


def compile_ahead(options: Options) -> None:
    """Have another process compile a part of the kernels, before this one imports what takes seconds."""
    dtype = _host_type(options)
    if dtype is not None:
        from llmbatch.engine.cpu.compilation import compile_ahead

        compile_ahead(dtype, options.kv_cache_dtype)


def compile_kernels(options: Options) -> None:
    """Compile what a processor needs of them, or load it, while there is no model yet."""
    dtype = _host_type(options)
    if dtype is not None:
        from llmbatch.engine.cpu.compilation import compile_kernels

        compile_kernels(dtype, options.kv_cache_dtype)
