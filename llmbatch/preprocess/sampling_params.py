"""`SamplingParams`: one request's sampling, validated when it is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from llmbatch.arguments import INT32_MAX, INT64_MAX, finite, flag, nearest, refusal, shown, text, whole
from llmbatch.errors import ParameterError
from llmbatch.structured import Structure

MOST_DRAWS: Final = 1024  # answers to one row
MOST_LOGPROBS: Final = 20  # likeliest tokens that are told beside each token, as many as OpenAI tells
MOST_BIAS: Final = 100.0
_DIGITS: Final = 10  # of a token id
_LEAST_PENALTY: Final = 2.0**-126  # what a float32 can hold and logits can be divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the answer to one request is sampled. Raises `ParameterError` for a value out of range.

    Names and meanings are those of vLLM and OpenAI. Penalties and bias change the logits before a token is chosen, in
    this order: `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, `top_k`, `top_p`. Log-probabilities are
    those of the model, before any of these.

    >>> SamplingParams(max_tokens=16, stop="###").stop
    ('###',)
    """

    max_tokens: int = 512  # most tokens to generate
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # probability mass to sample from
    top_k: int = 0  # likeliest tokens to sample from, 0 for all
    min_p: float = 0.0  # least probability to sample from, as a share of the likeliest token's
    seed: int | None = None  # makes a sampled answer repeatable; draw i of n has seed + i
    n: int = 1  # answers to draw
    stop: tuple[str, ...] = ()  # texts that end the answer and are cut off; a string or a list is taken too
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the answer
    min_tokens: int = 0  # least tokens before anything but max_tokens may end the answer
    ignore_eos: bool = False  # go on to max_tokens
    presence_penalty: float = 0.0  # taken from the logit of each token that was generated
    frequency_penalty: float = 0.0  # likewise, as often as it was
    repetition_penalty: float = 1.0  # what logits of tokens in prompt and answer are divided by; negative: multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to logits; a mapping of token ids is taken too
    logprobs: int | None = None  # likeliest tokens whose log-probabilities are told beside each token's own
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens
    structured_outputs: Structure | None = None  # the form of the answer; a mapping is taken, see `Structure.of`

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "max_tokens", whole("max_tokens", self.max_tokens, 1, INT32_MAX))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            set_(self, name, finite(name, getattr(self, name)))
        set_(self, "top_k", whole("top_k", self.top_k, 0, INT32_MAX, rule="at least 0 (0 keeps all tokens)"))
        if self.seed is not None:
            set_(self, "seed", whole("seed", self.seed, 0))
        set_(self, "n", whole("n", self.n, 1, MOST_DRAWS))
        set_(self, "stop", _strings("stop", self.stop))
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        set_(self, "min_tokens", whole("min_tokens", self.min_tokens, 0, INT32_MAX))
        set_(self, "ignore_eos", flag("ignore_eos", self.ignore_eos))
        set_(self, "logit_bias", _bias(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                set_(self, name, whole(name, getattr(self, name), 0, MOST_LOGPROBS))
        if self.structured_outputs is not None:
            set_(self, "structured_outputs", Structure.of(self.structured_outputs))
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.temperature < 0:
            raise ParameterError(f"temperature must be at least 0, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ParameterError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise refusal("min_p", "be at least 0 and at most 1", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise refusal(name, "be at least -2 and at most 2", getattr(self, name))
        if self.repetition_penalty < _LEAST_PENALTY:
            raise refusal("repetition_penalty", "be above 0 (1 changes nothing)", self.repetition_penalty)
        if self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", f"be at most max_tokens, {self.max_tokens}", self.min_tokens)
        if self.seed is not None and self.seed > INT64_MAX - self.n + 1:
            raise refusal("seed", f"be at most {INT64_MAX - self.n + 1}, so that draw i of n has seed + i", self.seed)
        if self.ignore_eos and self.structured_outputs is not None:
            raise refusal("ignore_eos", "be left out with structured_outputs, whose answers end by themselves", True)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one, so that equal prompts have equal answers."""
        return self.temperature == 0

    @property
    def draws(self) -> int:
        """How many answers must be computed: greedy ones are all the same."""
        return 1 if self.greedy else self.n

    @property
    def processes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return bool(
            self.min_tokens
            or self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or (self.min_p and not self.greedy)
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """The parameters that may affect how long answers become: all but the seed, and what is told of tokens."""
        others = ("seed", "n", "logprobs", "prompt_logprobs")
        return tuple(getattr(self, name) for name in _NAMES if name not in others)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], base: SamplingParams | None = None) -> SamplingParams:
        """Build from `mapping`, with `base` (the defaults) for the rest; None means not given.

        Raises `ParameterError` for an unknown key or a value out of range.
        """
        for key in mapping:
            check_sampling_name(key)
        given = {key: value for key, value in mapping.items() if value is not None}
        if "response_format" in given:  # OpenAI's name for the same
            if "structured_outputs" in given:
                raise refusal("response_format", "be left out beside structured_outputs", given["response_format"])
            given["structured_outputs"] = Structure.of_format(given.pop("response_format"))
        return replace(base or cls(), **cast("dict[str, Any]", given))


SamplingParams.__module__ = "llmbatch"  # which it is imported from


_NAMES = tuple(field.name for field in fields(SamplingParams))
NAMES: Final = (*_NAMES, "response_format")  # of parameters, with those that are other words for one


def check_sampling_name(name: str) -> None:
    """Raise `ParameterError` where a name is that of no sampling parameter."""
    if name not in NAMES:
        near = nearest(name, NAMES)
        meant = f"did you mean {near}? " if near else ""
        raise ParameterError(f"unknown sampling parameter {shown(name)}: {meant}known are {', '.join(NAMES)}")


def check_turns(params: SamplingParams) -> None:
    """Raise ParameterError where parameters ask for what has no meaning for conversations."""
    if params.n > 1:
        raise refusal("n", "be left out with turns, each of which has one answer", params.n)
    if params.prompt_logprobs is not None:
        rule = "be left out with turns, each of which has a prompt of its own"
        raise refusal("prompt_logprobs", rule, params.prompt_logprobs)


def _strings(name: str, value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise ParameterError(f"{name} must be a string or a list of strings, got {shown(value)}")
    if "" in values:
        raise ParameterError(f"{name} must hold no empty string, got {shown(value)}")
    return tuple(text(name, one) for one in values)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise refusal(name, "be a list of token ids", value)
    return tuple(sorted({whole(name, token, 0, INT32_MAX) for token in value}))


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return biases by token id, sorted; keys may be texts of digits, as JSON has them."""
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        raise refusal("logit_bias", "map token ids to numbers", value)
    pairs = list(pairs)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise refusal("logit_bias", "map token ids to numbers", value)
    found: dict[int, float] = {}
    for token, bias in pairs:
        if bias is None:  # a struct's field that this row does not give
            continue
        if isinstance(token, str) and not (token.isdecimal() and len(token) <= _DIGITS):
            raise refusal("logit_bias", "have token ids as its keys", token)
        number = whole("logit_bias[key]", int(token) if isinstance(token, str) else token, 0, INT32_MAX)
        found[number] = finite(f"logit_bias of token {number}", bias)
        if abs(found[number]) > MOST_BIAS:
            raise refusal(f"logit_bias of token {number}", "be at least -100 and at most 100", bias)
    return tuple(sorted(found.items()))
