"""What a job is asked to do, checked before anything starts: one record behind CLI, `run` and `LLMOperator`.

The keywords are listed once, in `OptionArgs`, with their types, defaults and help. This module imports nothing heavy.
Annotations are evaluated here, unlike elsewhere, since the command line reads those of `OptionArgs`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict, Unpack

from llmbatch.arguments import check_names, endpoints, finite, one_of, path, refusal, text
from llmbatch.choices import (
    ENGINES,
    ON_ERROR,
    POLICIES,
    AttentionName,
    DType,
    EngineName,
    Keyword,
    KVDType,
    KVPlace,
    LoadFormat,
    OnError,
    OverlapName,
    Policy,
    WeightsName,
)
from llmbatch.engine.config import EngineConfig
from llmbatch.errors import ParameterError

if TYPE_CHECKING:
    from llmbatch.openai.requests import BatchLines
    from llmbatch.preprocess.prompts import PromptSource
    from llmbatch.preprocess.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Options(EngineConfig):
    """Everything about a job but its input and output. Raises ParameterError."""

    model: str
    source: "PromptSource | BatchLines"
    sampling: "SamplingParams"
    sampling_column: str | None = None
    continuation: str | None = None  # column of texts that are scored; nothing is generated
    engine: EngineName = "torch"
    output_tokens: str | None = None  # column of the tokens that the simulated engine generates; null: max_tokens
    on_error: OnError = "column"  # what a row that fails does: say so in its columns, or end the job
    row_timeout: float | None = None  # seconds that the steps a row is in may take together
    order: Policy = "blend"
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
        if self.source.turns is not None:
            self._check_turns()
        if self.row_timeout is not None:
            seconds = finite("row_timeout", self.row_timeout)
            if seconds <= 0:
                raise refusal("row_timeout", "be above 0 seconds", self.row_timeout)
            set_(self, "row_timeout", seconds)

    def _check_turns(self) -> None:
        """Refuse what has no meaning for conversations."""
        given = {
            "n": self.sampling.n > 1,
            "prompt_logprobs": self.sampling.prompt_logprobs is not None,
            "continuation": self.continuation is not None,
        }
        for name in (name for name, there in given.items() if there):
            raise ParameterError(f"{name} must be left out with turns: each turn has one answer", option=name)

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
    def build(cls, **options: Unpack["OptionArgs"]) -> "Options":
        """Make options of the keywords of the public functions.

        `sampling_params` is one `SamplingParams` or mapping for all rows, or the name of a column of them. Sampling
        parameters that are keywords (`max_tokens=256`) override those for all rows, and a column's entries override
        both.
        """
        from llmbatch.preprocess.prompts import PromptSource

        rest = _checked(options)
        return cls._of(PromptSource(**_taken(rest, PromptArgs.__annotations__)), rest)

    @classmethod
    def of_batch(cls, **options: Unpack["OptionArgs"]) -> "Options":
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
    def _of(cls, source: "PromptSource | BatchLines", rest: dict[str, Any]) -> "Options":
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


class PromptArgs(TypedDict, total=False):
    """Where prompts come from: by one of the first four."""

    prompt: Annotated[str | None, Keyword("a column of prompts: text, or lists of token ids", metavar="COL")]
    template: Annotated[str | None, Keyword("a prompt made of columns: 'Q: {question}'", metavar="T")]
    messages: Annotated[str | None, Keyword("a column of OpenAI messages", metavar="COL")]
    turns: Annotated[
        str | None,
        Keyword("a column of lists of user messages, answered in turn (column answers)", metavar="COL"),
    ]
    chat: Annotated[bool, Keyword("wrap each prompt as a user message through the chat template", False)]
    system: Annotated[str | None, Keyword("system message of each chat; implies --chat", metavar="TEXT")]
    tools: Annotated[
        Sequence[Mapping[str, Any]] | str | None,
        Keyword("OpenAI tools for the chat template: JSON for all rows, or a column", metavar="TOOLS"),
    ]
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, Keyword("passed to the chat template", metavar="JSON")]


class AnswerArgs(TypedDict, total=False):
    """How answers are drawn and when they end."""

    max_tokens: Annotated[int | None, Keyword("most tokens of an answer", 512, metavar="N")]
    temperature: Annotated[
        float | None, Keyword("0 takes the likeliest token; above it, tokens are drawn", 0.0, metavar="T")
    ]
    top_p: Annotated[
        float | None, Keyword("draw from the likeliest tokens that have this probability together", 1.0, metavar="P")
    ]
    top_k: Annotated[int | None, Keyword("draw from so many likeliest tokens, 0: from all", 0, metavar="K")]
    min_p: Annotated[
        float | None,
        Keyword("draw from tokens of this share of the likeliest one's probability", 0.0, metavar="P"),
    ]
    seed: Annotated[int | None, Keyword("draw the same answers each time", metavar="S")]
    n: Annotated[int | None, Keyword("answers to draw for each row", 1, metavar="N")]
    stop: Annotated[str | Sequence[str] | None, Keyword("text that ends an answer; may be repeated", metavar="TEXT")]
    stop_token_ids: Annotated[Sequence[int] | None, Keyword("token that ends an answer; may be repeated", metavar="ID")]
    min_tokens: Annotated[int | None, Keyword("least tokens of an answer", 0, metavar="N")]
    ignore_eos: Annotated[bool | None, Keyword("go on to --max-tokens in every answer", False)]
    presence_penalty: Annotated[
        float | None, Keyword("taken from the logits of tokens that are in the answer", 0.0, metavar="X")
    ]
    frequency_penalty: Annotated[float | None, Keyword("likewise, as often as they are", 0.0, metavar="X")]
    repetition_penalty: Annotated[
        float | None, Keyword("divides the logits of tokens that are in prompt or answer", 1.0, metavar="X")
    ]
    logit_bias: Annotated[
        Mapping[str, float] | Mapping[int, float] | None,
        Keyword("added to the logits of tokens: '{\"11\": -5}'", metavar="JSON"),
    ]
    logprobs: Annotated[
        int | None, Keyword("tell log-probabilities of tokens, and of so many likeliest ones beside each", metavar="K")
    ]
    prompt_logprobs: Annotated[int | None, Keyword("likewise of the prompt's tokens", metavar="K")]
    structured_outputs: Annotated[
        Mapping[str, Any] | None,
        Keyword('form of answers: \'{"choice": ["yes", "no"]}\', or json, regex, grammar', metavar="JSON"),
    ]
    response_format: Annotated[Mapping[str, Any] | None, Keyword("likewise, as OpenAI has it", metavar="JSON")]
    sampling_params: Annotated[
        "SamplingParams | Mapping[str, Any] | str | None",
        Keyword("a column of structs or JSON that overrides the above for its row", metavar="COL"),
    ]
    continuation: Annotated[
        str | None,
        Keyword(
            "column of texts, or lists of them, whose log-probability is told; nothing is generated", metavar="COL"
        ),
    ]
    on_error: Annotated[
        OnError, Keyword("what a failed row does: fill its column error, or end the job", Options.on_error)
    ]
    row_timeout: Annotated[
        float | None,
        Keyword("most seconds that a row's steps may take together", means="no limit", metavar="S"),
    ]


class EngineArgs(TypedDict, total=False):
    """Where and how the model is run."""

    order: Annotated[Policy, Keyword("the order in which rows are run", Options.order)]
    device: Annotated[
        str, Keyword("cpu, cuda, cuda:N; auto: a GPU where there is one", EngineConfig.device, metavar="D")
    ]
    attention: Annotated[AttentionName, Keyword("kernels on a GPU", EngineConfig.attention, "the first that works")]
    overlap: Annotated[OverlapName, Keyword("how a GPU runs a step", EngineConfig.overlap, "as measured there")]
    dtype: Annotated[
        DType,
        Keyword("type of weights and KV; int8, int4, fp8: of layers", EngineConfig.dtype, "bfloat16 where it is fast"),
    ]
    kv_cache_dtype: Annotated[
        KVDType,
        Keyword("type of keys and values; int8 on a processor, fp8 on a GPU", EngineConfig.kv_cache_dtype, "as dtype"),
    ]
    kv: Annotated[
        KVPlace, Keyword("where KV lies; host: in the memory of a GPU's host, which attends", EngineConfig.kv)
    ]
    context_length: Annotated[
        int | None, Keyword("most tokens of a prompt and its answer together", means="the model's", metavar="N")
    ]
    kv_memory: Annotated[
        int | None,
        Keyword("memory for KV pages, in bytes; a command takes 4GiB, too", means="by free memory", metavar="BYTES"),
    ]
    weights: Annotated[
        WeightsName,
        Keyword(
            "where layers lie: in memory, or as many as fit and the rest in a file (of a GPU: in its host's memory) "
            "from which each step fetches them",
            EngineConfig.weights,
            "resident where they fit",
        ),
    ]
    weights_memory: Annotated[
        int | None,
        Keyword("memory for weights, in bytes; a command takes 4GiB, too", means="by free memory", metavar="BYTES"),
    ]
    page_size: Annotated[int | None, Keyword("tokens in a KV page", means="8 on a processor, 16 on a GPU", metavar="N")]
    max_running: Annotated[
        int | None, Keyword("most rows in flight", means="512 on a processor, 2048 on a GPU", metavar="N")
    ]
    step_tokens: Annotated[int | None, Keyword("tokens of a step", means="decided step by step", metavar="N")]
    tensor_parallel: Annotated[
        int,
        Keyword("processes that share the model's weights, on a processor", EngineConfig.tensor_parallel, metavar="N"),
    ]
    load_format: Annotated[LoadFormat, Keyword("dummy: random weights, for benchmarks", EngineConfig.load_format)]
    engine: Annotated[EngineName, Keyword("simulated: no model runs, answers are placeholders", Options.engine)]
    output_tokens: Annotated[
        str | None, Keyword("a column of the tokens that the simulated engine generates", metavar="COL")
    ]
    trust_remote_code: Annotated[bool, Keyword("run code that comes with the model", EngineConfig.trust_remote_code)]


class BesideArgs(TypedDict, total=False):
    """Endpoints that run the model elsewhere, and what is asked of them."""

    beside: Annotated[
        str | Sequence[str] | None,
        Keyword(
            "an endpoint that answers, in place of an engine here: http://HOST:PORT; may be repeated", metavar="URL"
        ),
    ]
    api_key_file: Annotated[
        str | os.PathLike[str] | None,
        Keyword("a file with the key of the endpoints", means="the variable OPENAI_API_KEY", metavar="F"),
    ]
    ttft: Annotated[
        float | None,
        Keyword(
            "seconds to the first token that other requests of an endpoint may take beside the job",
            means="twice what they took before it",
            metavar="S",
        ),
    ]


class OptionArgs(PromptArgs, AnswerArgs, EngineArgs, BesideArgs, total=False):
    """The keywords of `LLMOperator`, which `run` and `explain` take too."""

    model: Required[Annotated[str | os.PathLike[str], Keyword("a folder, a .gguf file or a hub name", metavar="M")]]
