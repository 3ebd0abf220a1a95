"""The fields of a request's body: those that are known at each url, and the parameters that they become.

Names and meanings are OpenAI's, and vLLM's where OpenAI has none. A field that is null counts as not given, as
OpenAI's clients leave it out. Every other field is an error with its name: an answer to half of what was asked would
look like one to all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.arguments import INT32_MAX, INT64_MAX, flag, json_object, nearest, one_of, refusal, shown, text, whole
from llmbatch.errors import ParameterError
from llmbatch.preprocess.sampling_params import MOST_LOGPROBS

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

TIERS: Final = ("auto", "default", "flex")  # of `service_tier`
# These say nothing of the answer.
_KEPT: Final = ("model", "user", "metadata", "service_tier", "prompt_cache_key", "safety_identifier")
_SAMPLING: Final[tuple[str, ...]] = (
    *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "response_format", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("repetition_penalty", "prompt_logprobs", "structured_outputs"),
)
_ENDS: Final = ("add_generation_prompt", "continue_final_message")  # of a chat, given to its template
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_BOTH: Final = (*_KEPT, *_SAMPLING, "stream", "logprobs")
# What clients send although it is so where it is left out. Nothing else is taken.
_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    CHAT: {"store": False},
    COMPLETIONS: {"echo": False, "best_of": 1},
}
FIELDS: Final = {
    CHAT: (
        *_BOTH,
        "messages",
        *_TOOLS,
        "max_completion_tokens",
        "top_logprobs",
        *_ENDS,
        "chat_template_kwargs",
        *_DEFAULTS[CHAT],
    ),
    COMPLETIONS: (*_BOTH, "prompt", *_DEFAULTS[COMPLETIONS]),
}
_LETTERS: Final = 100  # of a field's name that an error shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one line asks for, each value in the form in which a column of rows has it."""

    messages: str | None = None  # JSON text, as are the others but for prompts
    tools: str | None = None
    chat_template_kwargs: str | None = None
    prompt: str | None = None
    prompt_ids: NDArray[np.int64] | None = None
    sampling: str  # sampling parameters
    model: str | None


def read_body(url: str, body: Mapping[str, Any]) -> Asked:
    """Read the body of a request. Raises ParameterError, whose message begins with the field's name."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_fields(url, given)
    if "service_tier" in given:
        one_of("service_tier", given["service_tier"], TIERS)
    if flag("stream", given.get("stream", False)):
        raise ParameterError("stream must be false or be left out, got True: a batch is answered as a whole")
    sampling: dict[str, Any] = {name: given[name] for name in _SAMPLING if name in given}
    model = None if "model" not in given else text("model", given["model"])
    if url == CHAT:
        return _chat(given, sampling, model)
    if "logprobs" in given:
        sampling["logprobs"] = given["logprobs"]
    return _completion(given, sampling, model)


def _check_fields(url: str, given: Mapping[str, Any]) -> None:
    known = FIELDS[url]
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            way_out = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise ParameterError(
                f"{name[:_LETTERS] or repr(name)} must be left out, since {url} has no such field here, "
                f"got {shown(value)}: {way_out}"
            )
    for name, default in _DEFAULTS[url].items():
        if name in given and not (type(given[name]) is type(default) and given[name] == default):
            raise refusal(name, f"be {json.dumps(default)} or be left out", given[name])


def _chat(given: Mapping[str, Any], sampling: dict[str, Any], model: str | None) -> Asked:
    if "messages" not in given:
        raise refusal("messages", "be given", None)
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise refusal("max_completion_tokens", "be left out beside max_tokens", given["max_completion_tokens"])
        sampling["max_tokens"] = whole("max_completion_tokens", given["max_completion_tokens"], 1, INT32_MAX)
    tells = flag("logprobs", given.get("logprobs", False))
    if tells:
        sampling["logprobs"] = whole("top_logprobs", given.get("top_logprobs", 0), 0, MOST_LOGPROBS)
    elif "top_logprobs" in given:
        raise ParameterError(
            f"top_logprobs must be left out without logprobs, got {shown(given['top_logprobs'])}: add logprobs: true"
        )
    kwargs = json_object("chat_template_kwargs", given.get("chat_template_kwargs", {}))
    for name in _ENDS:
        if name in given:
            if name in kwargs:
                raise refusal(name, "be left out beside the same in chat_template_kwargs", given[name])
            kwargs[name] = flag(name, given[name])
    return Asked(
        messages=_json("messages", given["messages"]),
        tools=_tools(given),
        chat_template_kwargs=json.dumps(kwargs) if kwargs else None,
        sampling=_sampling(sampling),
        model=model,
    )


def _tools(given: Mapping[str, Any]) -> str | None:
    """Return the tools that the model is told of: none where it must not call any."""
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ParameterError(
            f'tool_choice must be "auto", "none" or be left out, got {shown(choice)}: tools are given to the chat '
            "template, and nothing else makes the model call them"
        )
    tools = given.get("tools") if choice == "auto" else None
    if not flag("parallel_tool_calls", given.get("parallel_tool_calls", True)) and tools:
        raise ParameterError(
            "parallel_tool_calls must be true or be left out beside tools, got False: the model is not kept from them"
        )
    return _json("tools", tools) if tools else None


def _completion(given: Mapping[str, Any], sampling: dict[str, Any], model: str | None) -> Asked:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, (str, list)) for one in prompt):
        if len(prompt) > 1:
            raise ParameterError(
                f"prompt must be one prompt, got a list of {len(prompt)}: give each prompt a request of its own"
            )
        prompt = prompt[0]
    asked = _sampling(sampling)
    if isinstance(prompt, str):
        return Asked(prompt=text("prompt", prompt), sampling=asked, model=model)
    if not isinstance(prompt, list):
        raise ParameterError(f"prompt must be text or a list of token ids, got {shown(prompt)}")
    return Asked(prompt_ids=_ids(prompt), sampling=asked, model=model)


def _ids(prompt: list[Any]) -> NDArray[np.int64]:
    try:
        ids = pa.array(prompt)
    except (pa.ArrowException, OverflowError):
        ids = None
    if ids is not None and not len(ids):
        return np.empty(0, np.int64)
    if ids is None or ids.null_count or ids.type != pa.int64():
        bad = (at for at, one in enumerate(prompt) if type(one) is not int or abs(one) > INT64_MAX)
        place = next(bad, 0)
        raise ParameterError(f"prompt[{place}] must be a token id, got {shown(prompt[place])}")
    found: NDArray[np.int64] = ids.to_numpy()
    return found


def _sampling(sampling: Mapping[str, Any]) -> str:
    """Write sampling parameters as JSON; an error has the name of one."""
    return "{" + ", ".join(f'"{name}": {_json(name, value)}' for name, value in sampling.items()) + "}"


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise ParameterError(f"{name} must not be nested so deeply") from None
    except (TypeError, ValueError) as error:  # of a column of structs, which may hold anything
        raise ParameterError(f"{name} must be JSON values, got {shown(value)}: {error}") from None
