"""What a job is asked to do, checked before anything starts: one record behind CLI, `run` and `LLMOperator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmbatch.arguments import finite, one_of, path, text
from llmbatch.choices import ENGINES, ON_ERROR, POLICIES, EngineName, OnError, Policy
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.sampling_params import SamplingParams

_PROMPTS = tuple(PromptSource.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Options(EngineConfig):
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
    notes: tuple[str, ...] = ()  # what the user should be told, a sentence each

    def __post_init__(self) -> None:
        super().__post_init__()
        set_ = object.__setattr__
        set_(self, "model", path("model", self.model))
        for name in ("sampling_column", "output_tokens"):
            if getattr(self, name) is not None:
                text("sampling_params" if name == "sampling_column" else name, getattr(self, name))
        one_of("order", self.order, POLICIES)
        one_of("engine", self.engine, ENGINES)
        one_of("on_error", self.on_error, ON_ERROR)
        if self.output_tokens is not None and self.engine != "simulated":
            raise ParameterError("output_tokens is for engine='simulated', which generates that many; leave it out")
        if self.row_timeout is not None:
            set_(self, "row_timeout", finite("row_timeout", self.row_timeout))
            if self.row_timeout <= 0:
                raise ParameterError(f"row_timeout must be above 0 seconds, got {self.row_timeout:g}")

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
