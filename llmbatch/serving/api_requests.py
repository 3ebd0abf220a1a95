"""Bodies of requests as guests: read as the lines of a batch are, so that both ask for the same by the same words.

What an endpoint knows beside that is how an answer is sent (`stream`, `stream_options`) and how urgent it is
(`service_tier`, which a batch takes, too). The rest of a body goes, as the one row of a table, the way of every row.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from llmbatch.arguments import flag, json_fault, refusal, shown, text
from llmbatch.engine.model.outline import shape_of
from llmbatch.errors import ParameterError, RowError
from llmbatch.inference.worker import Worker
from llmbatch.openai.fields import COMPLETIONS
from llmbatch.openai.requests import COLUMNS
from llmbatch.openai.validation import NO_TEMPLATE, has_template
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.token_bytes import bytes_of_part
from llmbatch.runtime.online.guests import Guest, GuestListener
from llmbatch.serving.refused import Refused

_MEASURED: Final = 1 << 20  # bytes of a body: the prompts of larger ones are measured first
_MOST_TOLD: Final = 1 << 21  # log-probabilities in the choices of an answer: some hundred bytes each at writing
_ROW: Final = ("-", "POST")  # custom_id and method of the row


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What one request asks for: some draws of an answer to one prompt."""

    url: str
    stream: bool
    include_usage: bool  # in a stream
    best_effort: bool  # due by no time
    shard: RowRequests  # of one row, without an error

    @property
    def params(self) -> SamplingParams:
        """The sampling of all draws."""
        requests = self.shard.requests
        return requests.params[int(requests.params_index[0])]

    @property
    def draws(self) -> int:
        """How many answers are computed: likeliest ones are all the same."""
        return len(self.shard.requests)

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return int(self.shard.num_input_tokens[0])

    def guest(self, draw: int, due: float, listener: GuestListener) -> Guest:
        """Make the guest of one draw; `due` is `time.monotonic` by which its first token is wanted."""
        requests, params = self.shard.requests, self.params
        seed = None if params.seed is None else params.seed + draw
        told = None if draw else params.prompt_logprobs  # of the prompt the first draw tells
        return Guest(
            tokens=requests.tokens[requests.offsets[draw] : requests.offsets[draw + 1]],
            max_tokens=int(requests.max_tokens[draw]),
            params=replace(params, n=1, seed=seed, prompt_logprobs=told),
            serial=secrets.randbits(63),
            due=due,
            listener=listener,
        )


@dataclass(frozen=True, slots=True)
class ApiRequestReader:
    """Reads bodies for one model."""

    worker: Worker
    model: str

    def read(self, url: str, data: bytes) -> ApiRequest:
        """Read the body of a request to a url. Raises Refused."""
        body = read_object(data)
        if len(data) > _MEASURED:
            _check_size(self.worker, url, body)
        if has_template(body):
            raise Refused.of(url, RowError("parameters", NO_TEMPLATE))
        try:
            stream = flag("stream", _taken(body, "stream", False))
            include_usage = _include_usage(_taken(body, "stream_options", None), stream)
            if stream and body.get("prompt_logprobs") is not None:
                raise refusal("prompt_logprobs", "be left out where stream is true", body["prompt_logprobs"])
            model = _taken(body, "model", None)
            if model is not None and text("model", model) != self.model:
                raise Refused(
                    404, f"model must be {self.model!r}, got {shown(model)}", param="model", code="model_not_found"
                )
        except ParameterError as error:
            raise Refused.of(url, RowError("parameters", str(error))) from None
        try:
            row = (*_ROW, url, json.dumps(body))
        except RecursionError as error:
            raise _no_object(error) from None
        table = pa.table({name: [value] for name, value in zip(COLUMNS, row, strict=True)})
        shard = self.worker.shard(table)
        if shard.errors:
            raise Refused.of(url, shard.errors[0])
        api_request = ApiRequest(url, stream, include_usage, body.get("service_tier") == "flex", shard)
        _check_told(api_request)
        return api_request


def _check_told(api_request: ApiRequest) -> None:
    """Refuse choices that tell more log-probabilities than are written at once; any one choice is. Raises Refused."""
    params, told = api_request.params, 0
    if params.logprobs is not None:
        told += int(api_request.shard.requests.max_tokens[0]) * (1 + params.logprobs)
    if params.prompt_logprobs is not None and api_request.url == COMPLETIONS:  # in each choice of it
        told += api_request.prompt_tokens * (1 + params.prompt_logprobs)
    if params.n > 1 and params.n * told > _MOST_TOLD:
        message = (
            f"n must be at most {max(1, _MOST_TOLD // told):,} where an answer may tell {told:,} log-probabilities, "
            f"got {params.n:,}: ask for fewer answers, tokens or log-probabilities"
        )
        raise Refused.of(api_request.url, RowError("parameters", message))


def _check_size(worker: Worker, url: str, body: Mapping[str, Any]) -> None:
    """Refuse what no context holds before it is tokenised, which would take minutes. Raises Refused."""
    context, prompt = worker.model.context_length, body.get("prompt")
    letters = _letters([prompt, body.get("messages"), body.get("tools")])
    if letters > context * _longest(worker):
        got = f"{letters:,} letters"
    elif isinstance(prompt, list) and len(prompt) > context:
        got = f"{len(prompt):,} parts"
    else:
        return
    message = f"prompt has {got}, which no context of {context:,} tokens holds: shorten the prompt"
    raise Refused.of(url, RowError("too_long", message))


@lru_cache(1)
def _longest(worker: Worker) -> int:
    """Return how many letters of a text a token stands for at most; a space before it may not be in its own text."""
    spelled = worker.tokenizer.spell(range(shape_of(worker.model).vocabulary))
    return 1 + max(1 if bytes_of_part(text) else len(text) for text in spelled)


def _letters(value: object) -> int:
    """Count the letters of all texts in a JSON value."""
    found, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, (list, dict)):
            rest += one if isinstance(one, list) else one.values()
    return found


def read_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body. Raises Refused."""
    try:
        value = json.loads(data.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refused(
            400, f"the body must be UTF-8: {error.reason} at byte {error.start}", code="invalid_json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _no_object(error) from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body must be a JSON object, got {shown(value)}", code="invalid_json")
    return value


def _no_object(error: Exception) -> Refused:
    return Refused(400, f"the body must be a JSON object: {json_fault(error)}", code="invalid_json")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _taken(body: dict[str, Any], name: str, default: object) -> Any:
    """Take a field out of a body; null counts as not given."""
    value = body.pop(name, None)
    return default if value is None else value


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise refusal("stream_options", "be left out where stream is not true", options)
    if not isinstance(options, Mapping) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise refusal("stream_options", "be an object with include_usage", options)
    if options.get("include_obfuscation"):
        raise refusal("stream_options.include_obfuscation", "be false or be left out", options["include_obfuscation"])
    return flag("stream_options.include_usage", options.get("include_usage", False))
