"""How each request is sampled, as arrays by request: what engines of processor and GPU look up for a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmbatch.compilation.decorators import compiled
from llmbatch.engine.generation.seeds import mix
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams

_HOTTEST: Final = float(np.finfo(np.float32).max)  # temperature: all tokens are as likely


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Some tokens for each distinct record of parameters, one behind the other."""

    tokens: NDArray[np.int32]
    values: NDArray[np.float32]  # one for each token
    offsets: NDArray[np.int64]  # [distinct + 1]

    @classmethod
    def of(cls, lists: Sequence[Sequence[tuple[int, float]]]) -> TokenLists:
        """Join lists of tokens and their values."""
        flat = [pair for one in lists for pair in one]
        return cls(
            np.array([token for token, _ in flat], np.int32),
            np.array([value for _, value in flat], np.float32),
            np.concatenate(([0], np.cumsum([len(one) for one in lists], dtype=np.int64))),
        )

    def joined(self, more: TokenLists) -> TokenLists:
        """Return these lists and the others behind them."""
        return TokenLists(
            np.concatenate((self.tokens, more.tokens)),
            np.concatenate((self.values, more.values)),
            np.concatenate((self.offsets, self.offsets[-1] + more.offsets[1:])),
        )


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of requests, one entry each unless said otherwise."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]  # of the request's draw
    processes: NDArray[np.bool_]  # its logits are changed before a token is chosen
    needs_logits: NDArray[np.bool_]  # that, or its answer has a form, or log-probabilities are told of it
    tells_of_prompt: NDArray[np.bool_]  # log-probabilities are told of its prompt
    numbers: NDArray[np.float32]  # [requests, 4] min_p, presence, frequency and repetition penalty
    min_tokens: NDArray[np.int32]
    logprobs: NDArray[np.int32]  # likeliest tokens to tell beside each token, -1: nothing is told
    prompt_logprobs: NDArray[np.int32]  # likewise beside each token of the prompt that is told of
    params_index: NDArray[np.int32]
    bias: TokenLists
    endings: TokenLists  # tokens that may not come before `min_tokens`

    def extended(
        self, requests: RequestBatch, rows: NDArray[np.int32], eos: Sequence[int], base_seed: int
    ) -> SamplingColumns:
        """Return the columns of a batch with requests that were written into `rows` since; arrays are kept."""
        fresh = SamplingColumns.of(RequestBatch.concatenate([requests.take(rows)]), eos, base_seed)
        for name in _BY_REQUEST:
            getattr(self, name)[rows] = getattr(fresh, name)
        added = requests.params[len(self.bias.offsets) - 1 :]
        bias, endings = self.bias.joined(_biases(added)), self.endings.joined(_endings(added, eos))
        return replace(self, params_index=requests.params_index, bias=bias, endings=endings)

    @classmethod
    def of(cls, requests: RequestBatch, eos: Sequence[int], base_seed: int) -> SamplingColumns:
        """Collect the parameters of a batch. `base_seed` is the seed of requests without one."""
        params, index = requests.params, requests.params_index

        def column(value: Callable[[SamplingParams], Any], kind: type[np.generic]) -> NDArray[Any]:
            return np.array([value(one) for one in params], kind)[index]

        def numbers(one: SamplingParams) -> tuple[float, ...]:
            return (one.min_p, one.presence_penalty, one.frequency_penalty, one.repetition_penalty)

        given = column(lambda one: -1 if one.seed is None else one.seed, np.int64)
        return cls(
            temperature=column(lambda one: min(one.temperature, _HOTTEST), np.float32),
            top_k=column(lambda one: one.top_k, np.int32),
            top_p=column(lambda one: one.top_p, np.float32),
            seeds=_seeds(given, base_seed, requests.serial, requests.draw),
            processes=column(lambda one: one.processes, np.bool_),
            needs_logits=column(_needs_logits, np.bool_),
            tells_of_prompt=requests.scored < requests.prompt_lengths,
            numbers=np.array([numbers(one) for one in params], np.float32).reshape(-1, 4)[index],
            min_tokens=column(lambda one: one.min_tokens, np.int32),
            logprobs=column(lambda one: -1 if one.logprobs is None else one.logprobs, np.int32),
            prompt_logprobs=column(lambda one: 1 if one.prompt_logprobs is None else one.prompt_logprobs, np.int32),
            params_index=index,
            bias=_biases(params),
            endings=_endings(params, eos),
        )


_BY_REQUEST: Final = tuple(
    field.name for field in fields(SamplingColumns) if field.name not in ("params_index", "bias", "endings")
)


def _needs_logits(one: SamplingParams) -> bool:
    return one.processes or one.logprobs is not None or one.structured_outputs is not None


def _biases(params: Sequence[SamplingParams]) -> TokenLists:
    return TokenLists.of([one.logit_bias for one in params])


def _endings(params: Sequence[SamplingParams], eos: Sequence[int]) -> TokenLists:
    return TokenLists.of([[(token, 0.0) for token in (*eos, *one.stop_token_ids)] for one in params])


@compiled
def _seeds(
    given: NDArray[np.int64], base: int, serial: NDArray[np.uint64], draw: NDArray[np.int32]
) -> NDArray[np.uint64]:
    """Choose a seed for each request: its own if given (>= 0), else a hash of `base` and its serial number.

    The draws of a row follow each other: the given seed and one more each, or a hash of the first draw's.
    """
    seeds = np.empty(given.size, np.uint64)
    for i in range(given.size):
        if given[i] >= 0:
            seeds[i] = np.uint64(given[i]) + np.uint64(draw[i])
        else:
            seeds[i] = mix(np.uint64(base), serial[i])
            if draw[i] > 0:
                seeds[i] = mix(seeds[i], np.uint64(draw[i]))
    return seeds
