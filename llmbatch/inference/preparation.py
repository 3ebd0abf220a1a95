"""What is done before a model's weights are loaded: its tokenizer is loaded, and kernels are compiled."""

from __future__ import annotations

from llmbatch.inference.options import Options
from llmbatch.preprocess.tokenizer import Tokenizer, load_tokenizer


def tokenizer_of(folder: str, options: Options) -> Tokenizer:
    """Load the tokenizer in a model's folder."""
    return load_tokenizer(folder, name=options.model, trust_remote_code=options.trust_remote_code)


def runs_here(options: Options) -> bool:
    """Tell whether a processor computes the model."""
    if options.engine == "simulated":
        return False
    from llmbatch.engine.devices import find_platform

    return find_platform(options.device).is_host


def compile_ahead(options: Options) -> None:
    """Have another process compile a part of the kernels, before this one imports what takes seconds."""
    if runs_here(options):
        from llmbatch.engine.cpu.compilation import compile_ahead

        compile_ahead(options.dtype, options.kv_cache_dtype)


def compile_kernels(options: Options) -> None:
    """Compile what a processor needs of them, or load it, while there is no model yet."""
    if runs_here(options):
        from llmbatch.engine.cpu.compilation import compile_kernels

        compile_kernels(options.dtype, options.kv_cache_dtype)
