"""What a job is asked to do, checked before anything starts: one record behind CLI, `run` and `LLMOperator`.

It is made of the keywords in `llmbatch.inference.keywords`. This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Unpack

from llmbatch.arguments import check_names, endpoints, finite, one_of, path, refusal, text
from llmbatch.choices import ENGINES, ON_ERROR, POLICIES, EngineName, OnError, Policy
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError
from llmbatch.inference.keywords import (
    DEFAULT_ENGINE,
    DEFAULT_ON_ERROR,
    DEFAULT_ORDER,
    EngineArgs,
    OptionArgs,
    PromptArgs,
)

if TYPE_CHECKING:
    from llmbatch.openai.requests import BatchLines
    from llmbatch.preprocess.prompts import PromptSource
    from llmbatch.preprocess.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Options(EngineConfig):
    """Everything about a job but its input and output. Raises ParameterError."""

    model: str
    source: PromptSource | BatchLines
    sampling: SamplingParams
    sampling_column: str | None = None
    continuation: str | None = None  # column of texts that are scored; nothing is generated
    engine: EngineName = DEFAULT_ENGINE
    output_tokens: str | None = None  # column of the tokens that the simulated engine generates; null: max_tokens
    on_error: OnError = DEFAULT_ON_ERROR  # what a row that fails does: say so in its columns, or end the job
    row_timeout: float | None = None  # seconds that the steps a row is in may take together
    order: Policy = DEFAULT_ORDER
    beside: tuple[str, ...] = ()  # endpoints that answer, in place of an engine here
    api_key_file: str | None = None  # with the key of these; None: the variable OPENAI_API_KEY
    ttft: float | None = None  # seconds that guests of these may wait for their first token
    notes: tuple[str, ...] = ()  # what the user should be told, a sentence each

    def __post_init__(self) -> None:
        super().__post_init__()
        set_ = object.__setattr__
        set_(self, "model", path("model", self.model))
        for name in ("sampling_column", "output_tokens", "continuation"):
            if getattr(self, name) is not None:
                text("sampling_params" if name == "sampling_column" else name, getattr(self, name))
        one_of("order", self.order, POLICIES)
        one_of("engine", self.engine, ENGINES)
        one_of("on_error", self.on_error, ON_ERROR)
        self._check_beside()
        if self.output_tokens is not None and self.engine != "simulated":
            raise ParameterError(
                f"output_tokens must be left out for engine={self.engine!r}, got {self.output_tokens!r}: only "
                "engine='simulated' (--engine simulated) generates that many",
                option="output_tokens",
                value=self.output_tokens,
            )
        if self.tensor_parallel > 1 and self.engine == "simulated":
            raise refusal("tensor_parallel", "be 1 for engine='simulated', which has no weights", self.tensor_parallel)
        if self.weights not in ("auto", "resident") and self.engine == "simulated":
            raise refusal("weights", "be auto or resident for engine='simulated', which has none", self.weights)
        if self.weights_memory is not None and self.engine == "simulated":
            raise refusal("weights_memory", "be left out for engine='simulated', which has none", self.weights_memory)
        if self.kv != "device" and self.engine == "simulated":
            raise refusal("kv", "be device for engine='simulated', which has none and no host beside it", self.kv)
        if self.source.turns is not None:
            self._check_turns()
        if self.row_timeout is not None:
            seconds = finite("row_timeout", self.row_timeout)
            if seconds <= 0:
                raise refusal("row_timeout", "be above 0 seconds", self.row_timeout)
            set_(self, "row_timeout", seconds)

    def _check_turns(self) -> None:
        """Refuse what has no meaning for conversations."""
        from llmbatch.preprocess.sampling_params import check_turns

        check_turns(self.sampling)
        if self.continuation is not None:
            raise refusal("continuation", "be left out with turns, which are answered", self.continuation)

    def _check_beside(self) -> None:
        """Bring endpoints to one form, and refuse what only they, or only an engine, can be asked."""
        object.__setattr__(self, "beside", endpoints("beside", self.beside))
        if not self.beside:
            for name in ("api_key_file", "ttft"):
                if getattr(self, name) is not None:
                    raise refusal(name, "be left out without beside (--beside)", getattr(self, name))
            return
        plain = {field.name: field.default for field in fields(self)}
        for name in EngineArgs.__annotations__:
            if name != "max_running" and getattr(self, name) != plain[name]:
                raise refusal(name, "be left out with beside, since the endpoint runs the model", getattr(self, name))
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key_file", path("api_key_file", self.api_key_file))
        if self.ttft is not None:
            object.__setattr__(self, "ttft", finite("ttft", self.ttft))
            if self.ttft <= 0:
                raise refusal("ttft", "be above 0 seconds", self.ttft)

    @classmethod
    def build(cls, **options: Unpack[OptionArgs]) -> Options:
        """Make options of the keywords of the public functions.

        `sampling_params` is one `SamplingParams` or mapping for all rows, or the name of a column of them. Sampling
        parameters that are keywords (`max_tokens=256`) override those for all rows, and a column's entries override
        both.
        """
        from llmbatch.preprocess.prompts import PromptSource

        rest = _checked(options)
        return cls._of(PromptSource(**_taken(rest, PromptArgs.__annotations__)), rest)

    @classmethod
    def of_batch(cls, **options: Unpack[OptionArgs]) -> Options:
        """Make options for lines of a batch, which say themselves what is asked; the rest is as `build` has it.

        Sampling parameters hold for lines that do not give them.
        """
        from llmbatch.openai.requests import BatchLines

        rest = _checked(options)
        asked = {**_taken(rest, PromptArgs.__annotations__), "continuation": rest.get("continuation")}
        column = rest.get("sampling_params")
        for name, value in {**asked, "sampling_params": column if isinstance(column, str) else None}.items():
            if value:
                raise refusal(name, "be left out for a batch, whose lines say what is asked", value)
        return cls._of(BatchLines(), rest)

    @classmethod
    def _of(cls, source: PromptSource | BatchLines, rest: dict[str, Any]) -> Options:
        from llmbatch.preprocess.prompts import PromptSource
        from llmbatch.preprocess.sampling_params import NAMES as SAMPLING_NAMES
        from llmbatch.preprocess.sampling_params import SamplingParams

        given = _taken(rest, dict.fromkeys(SAMPLING_NAMES))
        asked = rest.pop("sampling_params", None)
        base = asked if isinstance(asked, SamplingParams) else SamplingParams()
        column = asked if isinstance(asked, str) else None
        if isinstance(asked, Mapping):
            given = {**asked, **given}
        elif asked is not None and column is None and asked is not base:
            raise refusal("sampling_params", "be a mapping, SamplingParams or the name of a column", asked)
        base = SamplingParams.from_mapping(given, base)
        notes: tuple[str, ...] = ()
        generates = rest.get("continuation") is None
        if generates and given.get("max_tokens") is None and not isinstance(asked, (str, SamplingParams)):
            missing = (
                "max_tokens is not given" if isinstance(source, PromptSource) else "where a line has no max_tokens"
            )
            notes = (f"{missing}: answers end after at most {base.max_tokens} tokens",)
        return cls(source=source, sampling=base, sampling_column=column, notes=notes, **rest)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    check_names(options, OptionArgs.__annotations__)
    if "model" not in options:
        raise ParameterError("model must be given: a folder, a .gguf file or a hub name", option="model")
    return {**options}


def _taken(given: dict[str, Any], names: Mapping[str, object]) -> dict[str, Any]:
    return {name: given.pop(name) for name in list(given) if name in names}
