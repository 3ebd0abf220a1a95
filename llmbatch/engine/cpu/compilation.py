"""Compilation of kernels while a model is still loading: they depend on its number type, not on its sizes."""

from __future__ import annotations

import tempfile

import numpy as np

from llmbatch.choices import KVDType
from llmbatch.engine.cpu.compile_ahead import mark_of
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import DType
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.output import Step
from llmbatch.system.processes import await_beside, start_beside


def compile_ahead(dtype: DType, kv_cache_dtype: KVDType) -> None:
    """Have another process compile what kernels call by address, if it is not there; returns at once."""
    mark = mark_of(dtype, kv_cache_dtype)
    if mark is not None and not mark.exists():
        await_beside(start_beside("llmbatch.engine.cpu.compile_ahead", dtype, kv_cache_dtype))


def compile_kernels(dtype: DType, kv_cache_dtype: KVDType) -> None:
    """Run one step of a tiny model on the processor."""
    from transformers import LlamaConfig  # two seconds, in which the other process is at work

    from llmbatch.engine.cpu.engine import CpuEngine
    from llmbatch.engine.model.loader import load_model

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with tempfile.TemporaryDirectory(prefix="llmbatch-") as folder:
        config.save_pretrained(folder)
        loaded = load_model(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype, load_format="dummy", platform=HOST)
    one = np.ones(1, np.int32)
    nothing = np.zeros(1, np.int32)
    prompt = np.zeros(2, np.int32)
    engine = CpuEngine(loaded, num_pages=1, page_size=16)
    params = (SamplingParams(max_tokens=1),)
    engine.begin(RequestBatch(prompt, np.array([0, 2]), one, nothing, params, np.zeros(1, np.uint64), one))
    engine.execute(Step(0, 0, nothing, nothing, nothing, 2 * one, np.ones(1, np.bool_), nothing[None]))
