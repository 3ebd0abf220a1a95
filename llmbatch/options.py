"""What a job is asked to do, checked before anything starts: one record behind CLI, `run` and `LLMOperator`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    row_timeout: float | None = None  # seconds a row may take from its first step to its last
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
        _one_of("order", self.order, POLICIES)
        if not _DEVICE.fullmatch(self.device):
            raise ParameterError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        _one_of("attention", self.attention, ATTENTION)
        _one_of("overlap", self.overlap, OVERLAP)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("engine", self.engine, ENGINES)
        _one_of("on_error", self.on_error, ON_ERROR)
        if self.output_tokens is not None and self.engine != "simulated":
            raise ParameterError("output_tokens is for engine='simulated', which generates that many; leave it out")
        if self.row_timeout is not None and not self.row_timeout > 0:
            raise ParameterError(f"row_timeout must be above 0 seconds, got {self.row_timeout}")
        for name in ("kv_memory", "page_size", "max_running", "step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name} must be at least 1, got {value}")

    @classmethod
    def build(
        cls,
        *,
        model: str,
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
        if isinstance(sampling_params, SamplingParams):
            base = SamplingParams.from_mapping(given, sampling_params)
        elif isinstance(sampling_params, Mapping):
            given = {**sampling_params, **given}
            base = SamplingParams.from_mapping(given, SamplingParams())
        else:
            base = SamplingParams.from_mapping(given, SamplingParams())
        notes: tuple[str, ...] = ()
        if given.get("max_tokens") is None and not isinstance(sampling_params, (str, SamplingParams)):
            notes = (f"max_tokens is not given: answers end after at most {base.max_tokens} tokens",)
        column = sampling_params if isinstance(sampling_params, str) else None
        return cls(model=model, source=source, sampling=base, sampling_column=column, notes=notes, **rest)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ParameterError(f"{name} must be one of {', '.join(known)}, got {value!r}")
