"""What a job is asked to do, checked before anything starts: one record behind CLI, `run` and `LLMOperator`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmbatch.arguments import INT32_MAX, INT64_MAX, finite, flag, one_of, path, text, whole
from llmbatch.choices import (
    ATTENTION,
    DTYPES,
    ENGINES,
    LOAD_FORMATS,
    ON_ERROR,
    OVERLAP,
    POLICIES,
    AttentionName,
    EngineName,
    LoadFormat,
    OnError,
    OverlapName,
    Policy,
)
from llmbatch.choices import DType as DType
from llmbatch.errors import ParameterError
from llmbatch.prompts import PromptSource
from llmbatch.sampling import SamplingParams

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Tokens and sequences are counted in int32.
_MOST = {"page_size": INT32_MAX, "max_running": INT32_MAX, "step_tokens": INT32_MAX}
_PROMPTS = tuple(PromptSource.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything about a job but its input and output. Raises ParameterError."""

    model: str
    source: PromptSource
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_column: str | None = None
    engine: EngineName = "torch"
    output_tokens: str | None = None  # column of the tokens that the simulated engine generates; null: max_tokens
    on_error: OnError = "column"  # what a row that fails does: say so in its columns, or end the job
    row_timeout: float | None = None  # seconds that the steps a row is in may take together
    order: Policy = "blend"
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: a GPU where there is one
    attention: AttentionName = "auto"  # kernels, on a GPU
    overlap: OverlapName = "auto"  # how parts of a step run at the same time on a GPU; auto: as measured there
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    trust_remote_code: bool = False
    kv_memory: int | None = None  # bytes
    page_size: int | None = None  # tokens; None: what the device takes
    max_running: int | None = None  # sequences in flight; None: what the device takes
    step_tokens: int | None = None  # tokens a step; decided in closed loop when None
    notes: tuple[str, ...] = ()  # what the user should be told, a sentence each

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "model", path("model", self.model))
        for name in ("sampling_column", "output_tokens"):
            if getattr(self, name) is not None:
                text("sampling_params" if name == "sampling_column" else name, getattr(self, name))
        one_of("order", self.order, POLICIES)
        if not _DEVICE.fullmatch(str(self.device)):
            raise ParameterError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        one_of("attention", self.attention, ATTENTION)
        one_of("overlap", self.overlap, OVERLAP)
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("engine", self.engine, ENGINES)
        one_of("on_error", self.on_error, ON_ERROR)
        set_(self, "trust_remote_code", flag("trust_remote_code", self.trust_remote_code))
        if self.output_tokens is not None and self.engine != "simulated":
            raise ParameterError("output_tokens is for engine='simulated', which generates that many; leave it out")
        if self.row_timeout is not None:
            set_(self, "row_timeout", finite("row_timeout", self.row_timeout))
            if self.row_timeout <= 0:
                raise ParameterError(f"row_timeout must be above 0 seconds, got {self.row_timeout:g}")
        for name in ("kv_memory", "page_size", "max_running", "step_tokens"):
            if getattr(self, name) is not None:
                set_(self, name, whole(name, getattr(self, name), 1, _MOST.get(name, INT64_MAX)))

    @classmethod
    def build(
        cls,
        *,
        model: str | os.PathLike[str],
        prompt: str | None = None,
        template: str | None = None,
        messages: str | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | str | None = None,
        **rest: Any,
    ) -> Options:
        """Options from the keywords of the public functions.

        `sampling_params` is one `SamplingParams` or mapping for all rows, or the name of a column of them.
        Further keywords are sampling parameters (`max_tokens=256`), which a column's entries override, and the
        other fields of this class.
        """
        given = {key: rest.pop(key) for key in list(rest) if key in SamplingParams.__dataclass_fields__}
        fields = set(cls.__dataclass_fields__) - {"source", "sampling", "sampling_column", "notes"}
        unknown = sorted(set(rest) - fields)
        if unknown:
            raise ParameterError(
                f"{unknown[0]!r} is no option; the options are "
                f"{', '.join(sorted({*fields, *SamplingParams.__dataclass_fields__, *_PROMPTS, 'sampling_params'}))}"
            )
        source = PromptSource(
            prompt=prompt,
            template=template,
            messages=messages,
            chat=chat,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
        )
        base = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            base = sampling_params
        elif isinstance(sampling_params, Mapping):
            given = {**sampling_params, **given}
        elif sampling_params is not None and not isinstance(sampling_params, str):
            raise ParameterError(
                f"sampling_params must be a mapping, SamplingParams or the name of a column, got {sampling_params!r}"
            )
        base = SamplingParams.from_mapping(given, base)
        notes: tuple[str, ...] = ()
        if given.get("max_tokens") is None and not isinstance(sampling_params, (str, SamplingParams)):
            notes = (f"max_tokens is not given: answers end after at most {base.max_tokens} tokens",)
        column = sampling_params if isinstance(sampling_params, str) else None
        return cls(
            model=path("model", model), source=source, sampling=base, sampling_column=column, notes=notes, **rest
        )
