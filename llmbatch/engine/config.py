"""What an engine is asked to be, checked at birth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmbatch.arguments import INT32_MAX, INT64_MAX, flag, one_of, refusal, whole
from llmbatch.choices import (
    ATTENTION,
    DTYPES,
    KV_DTYPES,
    KV_PLACES,
    LOAD_FORMATS,
    OVERLAP,
    WEIGHTS,
    AttentionName,
    DType,
    KVDType,
    KVPlace,
    LoadFormat,
    OverlapName,
    WeightsName,
)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Tokens and sequences are counted in int32.
_MOST = {"context_length": INT32_MAX, "page_size": INT32_MAX, "max_running": INT32_MAX, "step_tokens": INT32_MAX}
# What options may be where processes share a model.
_OF_RANKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "weights": ("auto", "resident"),
        "overlap": ("auto", "sequential"),
        "kv": ("device",),
        "dtype": tuple(dtype for dtype in DTYPES if dtype != "fp8"),
    }
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where and how a model is run. Raises ParameterError."""

    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: a GPU where there is one
    attention: AttentionName = "auto"  # kernels, on a GPU
    overlap: OverlapName = "auto"  # how parts of a step run at the same time on a GPU; auto: as measured there
    dtype: DType = "auto"
    kv_cache_dtype: KVDType = "auto"
    kv: KVPlace = "device"  # host: keys and values lie in the memory of a GPU's host, which attends
    load_format: LoadFormat = "auto"
    weights: WeightsName = "auto"  # resident, or some in a file that each step reads; auto: as memory allows
    weights_memory: int | None = None  # bytes that weights may take; None: by free memory
    trust_remote_code: bool = False
    context_length: int | None = None  # most tokens of prompt and answer together; None: the model's
    kv_memory: int | None = None  # bytes
    page_size: int | None = None  # tokens; None: what the device takes
    max_running: int | None = None  # sequences in flight; None: what the device takes
    step_tokens: int | None = None  # tokens a step; decided in closed loop when None
    tensor_parallel: int = 1  # processes that share the model, each on cores or a GPU of its own

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if not _DEVICE.fullmatch(str(self.device)):
            raise refusal("device", "be auto, cpu, cuda or cuda:N", self.device)
        one_of("attention", self.attention, ATTENTION)
        one_of("overlap", self.overlap, OVERLAP)
        one_of("dtype", self.dtype, DTYPES)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        if self.kv_cache_dtype == "fp8" and self.attention not in ("auto", "triton"):
            rule = "be auto or triton where kv_cache_dtype is fp8, since the others read no such pages"
            raise refusal("attention", rule, self.attention)
        one_of("kv", self.kv, KV_PLACES)
        if self.kv == "host":
            if self.attention != "auto":
                raise refusal("attention", "be auto where kv is host, since the processor attends", self.attention)
            if self.overlap == "interleaved":
                raise refusal("overlap", "be sequential or auto where kv is host", self.overlap)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("weights", self.weights, WEIGHTS)
        set_(self, "trust_remote_code", flag("trust_remote_code", self.trust_remote_code))
        set_(self, "tensor_parallel", whole("tensor_parallel", self.tensor_parallel, 1, INT32_MAX))
        for name, kept in _OF_RANKS.items() if self.tensor_parallel > 1 else ():
            if getattr(self, name) not in kept:
                rule = f"be {' or '.join(kept)} where tensor_parallel is above 1"
                raise refusal(name, rule, getattr(self, name))
        if self.tensor_parallel > 1 and self.weights_memory is not None:
            rule = "be left out where tensor_parallel is above 1, since each rank keeps its share"
            raise refusal("weights_memory", rule, self.weights_memory)
        for name in ("context_length", "kv_memory", "page_size", "max_running", "step_tokens", "weights_memory"):
            if getattr(self, name) is not None:
                set_(self, name, whole(name, getattr(self, name), 1, _MOST.get(name, INT64_MAX)))

    @property
    def host_may_attend(self) -> bool:
        """Whether `kv` could be host, and is not."""
        return self.kv == "device" and self.dtype != "float16" and self.kv_cache_dtype != "fp8"
