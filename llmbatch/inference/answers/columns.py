"""Texts of answers, and columns of rows that ask for more: several answers, what is told of tokens, scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmbatch.engine.base import TokenLogprobs
from llmbatch.engine.generation.stop_strings import find_stop, known_characters
from llmbatch.inference.answers.row_parts import RequestAnswer
from llmbatch.inference.window import Window
from llmbatch.io.gather import pieces
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer

REASONS: Final = ["error", "stop", "length", "error", "error", "error"]  # by `FinishReason`

_TOLD_AT_ONCE: Final = 1 << 18  # log-probabilities of which Python objects are made together

Value = Any  # of a column, as Arrow takes it from Python


@dataclass(frozen=True, slots=True)
class AnswerTexts:
    """The texts of generated tokens: without special tokens, each cut before the stop string that ends it."""

    tokenizer: Tokenizer

    def __call__(
        self, requests: RequestBatch, index: NDArray[np.int32], answers: Sequence[NDArray[np.int32]]
    ) -> list[str]:
        """Decode the answers to the requests `index` of a batch."""
        texts = self.tokenizer.decode(answers)
        params = [requests.params[i] for i in requests.params_index[index].tolist()]
        stopped = [i for i, one in enumerate(params) if one.stop]
        before = {i: answers[i][: params[i].min_tokens - 1] for i in stopped if params[i].min_tokens > 1}
        free = dict(zip(before, map(known_characters, self.tokenizer.decode(list(before.values()))), strict=True))
        for i in stopped:
            found = find_stop(texts[i], params[i].stop, free.get(i, 0))
            texts[i] = texts[i][:found] if found >= 0 else texts[i]
        return texts


@dataclass(frozen=True, slots=True)
class AnswerColumns:
    """Builds the columns of answered rows from the answers of their requests."""

    tokenizer: Tokenizer

    def batches(
        self, window: Window, rows: NDArray[np.int32], answers: Sequence[list[RequestAnswer]]
    ) -> Iterator[pa.RecordBatch]:
        """Build batches of `AnswerSchema.rows`; `answers` are those of each row's requests.

        What is told of tokens takes some hundred bytes for each, so a batch has no more than `_TOLD_AT_ONCE`, or a row.
        """
        told = [sum(map(_count_told, parts)) for parts in answers]
        for begin, end in pieces(np.array(told, np.int64), _TOLD_AT_ONCE):
            yield self._build(window, rows[begin:end], answers[begin:end])

    def _build(self, window: Window, rows: NDArray[np.int32], answers: Sequence[list[RequestAnswer]]) -> pa.RecordBatch:
        schema, spelled = window.schema, self._spell(answers)
        values: dict[str, list[Value]] = {field.name: [] for field in schema.rows}
        for row, parts in zip(rows.tolist(), answers, strict=True):
            found = {"row": row, "num_input_tokens": int(window.shard.num_input_tokens[row])}
            found |= {"attempts": max(part.attempts for part in parts)}
            broken = next((part.error for part in parts if part.error is not None), None)
            if schema.turns:
                found |= _turns(parts, spelled)
            if broken is not None:
                found = {"num_generated_tokens": 0, "num_cached_tokens": 0, **found, "finish_reason": "error"}
                found |= {"error": broken.message, "error_kind": broken.kind}
            elif schema.turns:
                found |= {"generated_text": parts[-1].text, "finish_reason": REASONS[parts[-1].finish]}
                found |= {"logprobs": _told(parts[-1].logprobs, spelled)}
            elif schema.scores:
                found |= _scores(parts, several=schema.several)
            else:
                asked = window.requests.params_index[window.shard.request_of[row]]
                found |= self._answer(window.requests.params[asked], parts, spelled)
            for name, column in values.items():
                column.append(found.get(name))
        arrays = [pa.array(values[field.name], field.type) for field in schema.rows]
        return pa.RecordBatch.from_arrays(arrays, schema=schema.rows)

    def values(self, params: SamplingParams, parts: list[RequestAnswer]) -> dict[str, Value]:
        """Return the values of one row, whose requests all have answers; those of the row's number are left out."""
        return self._answer(params, parts, self._spell([parts]))

    def _answer(self, params: SamplingParams, parts: list[RequestAnswer], spelled: dict[int, str]) -> dict[str, Value]:
        choices = [
            {
                "text": part.text,
                "num_generated_tokens": part.tokens,
                "finish_reason": REASONS[part.finish],
                "logprobs": _told(part.logprobs, spelled),
            }
            for part in (parts if len(parts) == params.n else parts * params.n)
        ]
        first, told = choices[0], parts[0].prompt is not None  # nothing precedes the one token of a prompt
        return {
            "generated_text": first["text"],
            "num_generated_tokens": first["num_generated_tokens"],
            "num_cached_tokens": min(part.cached for part in parts),  # the others found what the first computed
            "finish_reason": first["finish_reason"],
            "choices": choices,
            "logprobs": first["logprobs"],
            "prompt_logprobs": _told(parts[0].prompt, spelled) if told or params.prompt_logprobs is None else [],
        }

    def _spell(self, answers: Sequence[list[RequestAnswer]]) -> dict[int, str]:
        """Find the text of every token that is told of."""
        told = [one.tokens for parts in answers for part in parts for one in (part.logprobs, part.prompt) if one]
        if not told:
            return {}
        tokens = [token for token in np.unique(np.concatenate([one.ravel() for one in told])).tolist() if token >= 0]
        return dict(zip(tokens, self.tokenizer.spell(tokens), strict=True))


def _turns(parts: list[RequestAnswer], spelled: dict[int, str]) -> dict[str, Value]:
    """Tell of each turn that was answered; the row's tokens are those of all turns."""
    answers = [
        {
            "text": part.text,
            "num_input_tokens": part.inputs,
            "num_generated_tokens": part.tokens,
            "num_cached_tokens": part.cached,
            "finish_reason": REASONS[part.finish],
            "logprobs": _told(part.logprobs, spelled),
        }
        for part in parts
        if part.error is None
    ]
    counted = ("num_input_tokens", "num_generated_tokens", "num_cached_tokens")
    return {**{name: sum(answer[name] for answer in answers) for name in counted}, "answers": answers}


def _count_told(part: RequestAnswer) -> int:
    """Count the log-probabilities that are told with an answer."""
    return sum(one.tokens.size for one in (part.logprobs, part.prompt) if one is not None)


def _told(told: TokenLogprobs | None, spelled: dict[int, str]) -> list[Value] | None:
    if told is None:
        return None
    found = []
    for tokens, values in zip(told.tokens.tolist(), told.values.tolist(), strict=True):
        likely = [
            {"token_id": token, "token": spelled[token], "logprob": value}
            for token, value in zip(tokens, values, strict=True)
            if token >= 0
        ]
        found.append({**likely[0], "top": likely[1:]})
    return found


def _scores(parts: list[RequestAnswer], *, several: bool) -> dict[str, Value]:
    """Sum up what is told of each text's tokens: each as such, and the likeliest in its place."""
    told = [part.prompt for part in parts]
    scores: dict[str, list[Value]] = {
        "continuation_logprob": [
            None if one is None else float(one.values[:, 0].sum(dtype=np.float64)) for one in told
        ],
        "continuation_is_greedy": [
            None if one is None else bool((one.tokens[:, 0] == one.tokens[:, 1]).all()) for one in told
        ],
        "num_continuation_tokens": [None if one is None else len(one.tokens) for one in told],
    }
    shown = scores if several else {name: values[0] for name, values in scores.items()}
    return {**shown, "num_generated_tokens": 0, "num_cached_tokens": min(part.cached for part in parts)}
