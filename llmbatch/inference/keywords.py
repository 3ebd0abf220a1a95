"""The keywords of `LLMOperator`, `run` and `explain`: each is listed once, with its type, default and help.

This module imports nothing heavy. Annotations are evaluated here, unlike elsewhere, since the command line reads them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Required, TypedDict

from llmbatch.choices import (
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

if TYPE_CHECKING:
    from llmbatch.preprocess.sampling_params import SamplingParams

DEFAULT_ENGINE: Final[EngineName] = "torch"
DEFAULT_ORDER: Final[Policy] = "blend"
DEFAULT_ON_ERROR: Final[OnError] = "column"


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
        OnError, Keyword("what a failed row does: fill its column error, or end the job", DEFAULT_ON_ERROR)
    ]
    row_timeout: Annotated[
        float | None,
        Keyword("most seconds that a row's steps may take together", means="no limit", metavar="S"),
    ]


class EngineArgs(TypedDict, total=False):
    """Where and how the model is run."""

    order: Annotated[Policy, Keyword("the order in which rows are run", DEFAULT_ORDER)]
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
        Keyword(
            "processes that share the model's weights, each on cores or a GPU of its own",
            EngineConfig.tensor_parallel,
            metavar="N",
        ),
    ]
    load_format: Annotated[LoadFormat, Keyword("dummy: random weights, for benchmarks", EngineConfig.load_format)]
    engine: Annotated[EngineName, Keyword("simulated: no model runs, answers are placeholders", DEFAULT_ENGINE)]
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
