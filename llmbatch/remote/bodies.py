"""What an endpoint is asked for a request: the path and the body, in OpenAI's names, or vLLM's where it has none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from llmbatch.openai.fields import CHAT, COMPLETIONS
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.remote.request_texts import asking_of
from llmbatch.structured import Structure

_PLAIN: Final = SamplingParams()
_WHERE_GIVEN: Final = (
    *("top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request as it is sent."""

    path: str
    fields: dict[str, Any]


def body_of(requests: RequestBatch, index: int, model: str) -> RequestBody:
    """Write the request `index` of a batch, whose tokens are those of `RequestTexts`."""
    asking = asking_of(requests.tokens[requests.offsets[index] : requests.offsets[index + 1]])
    fields: dict[str, Any] = {"model": model, **(asking if isinstance(asking, dict) else {"prompt": asking})}
    params = requests.params[requests.params_index[index]]
    fields |= _sampling(params, int(requests.max_tokens[index]), int(requests.draw[index]))
    return RequestBody(CHAT if isinstance(asking, dict) else COMPLETIONS, fields)


def _sampling(params: SamplingParams, max_tokens: int, draw: int) -> dict[str, Any]:
    """Collect what says how an answer is drawn; what an endpoint does by itself is left out."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": params.temperature}
    for name in _WHERE_GIVEN:
        if getattr(params, name) != getattr(_PLAIN, name):
            fields[name] = getattr(params, name)
    if params.seed is not None:
        fields["seed"] = params.seed + draw
    for name in ("stop", "stop_token_ids"):
        if getattr(params, name):
            fields[name] = list(getattr(params, name))
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.structured_outputs is not None:
        fields |= _form(params.structured_outputs)
    return fields


def _form(structure: Structure) -> dict[str, Any]:
    """Say which form an answer must have: OpenAI knows schemas, vLLM the others."""
    if structure.kind == "json":
        schema = {"name": "answer", "schema": json.loads(structure.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    asked = json.loads(structure.text) if structure.kind == "choice" else structure.text
    return {"structured_outputs": {structure.kind: asked}}
