"""Tables to requests: fitted to the context, bad rows told apart, equal rows merged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbatch.errors import DataError, RowError
from llmbatch.preprocess.build_requests import build_shard
from llmbatch.preprocess.prompts import PromptSource
from llmbatch.preprocess.request_batch import RowRequests
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.preprocess.tokenization.loading import load_tokenizer
from llmbatch.preprocess.tokenization.tokenizer import Tokenizer
from tests.support.tokenizers import save_fast

BOS = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, and one before each raw prompt."""
    return load_tokenizer(save_fast(tmp_path_factory.mktemp("raw")), name="plain")


def shard_of(
    prompts: list[str | None],
    tokenizer: Tokenizer,
    *,
    params: list[dict[str, Any] | str | None] | None = None,
    context_length: int = 100,
    **options: Any,
) -> RowRequests:
    table = pa.table({"p": pa.array(prompts, pa.string())})
    if params is not None:
        texts = [json.dumps(one) if isinstance(one, dict) else one for one in params]
        table = table.append_column("s", pa.array(texts, pa.string()))
    return build_shard(
        table,
        PromptSource(prompt="p", **options),
        sampling=SamplingParams(max_tokens=10),
        sampling_column=None if params is None else "s",
        tokenizer=tokenizer,
        context_length=context_length,
        vocabulary=258,
    )


def tokens_of(shard: RowRequests, request: int) -> list[int]:
    begin, end = shard.requests.offsets[request : request + 2]
    tokens: list[int] = shard.requests.tokens[begin:end].tolist()
    return tokens


def test_each_row_has_a_request_with_its_tokens(tokenizer: Tokenizer) -> None:
    shard = shard_of(["ab", "c"], tokenizer)
    assert shard.request_of.tolist() == [0, 1]
    assert [len(tokens_of(shard, i)) for i in (0, 1)] == [3, 2]
    assert shard.num_input_tokens.tolist() == [3, 2]
    assert shard.requests.max_tokens.tolist() == [10, 10]
    kinds = [shard.request_of, shard.num_input_tokens, shard.requests.tokens, shard.requests.max_tokens]
    assert [array.dtype for array in [*kinds, shard.requests.params_index]] == [np.int32] * 5
    assert shard.requests.offsets.dtype == np.int64


def test_raw_prompts_get_special_tokens_and_rendered_chats_none(chatty: Tokenizer) -> None:
    assert tokens_of(shard_of(["ab"], chatty), 0)[0] == BOS
    chat = shard_of(["ab"], chatty, chat=True)
    assert len(tokens_of(chat, 0)) == len("<user>ab<assistant>")
    assert BOS not in tokens_of(chat, 0)


def test_a_prompt_as_long_as_the_context_is_an_error_and_a_shorter_one_gets_what_is_left(
    tokenizer: Tokenizer,
) -> None:
    shard = shard_of(["aaaa", "aaa", "a"], tokenizer, context_length=5)
    message = "prompt has 5 tokens, the context holds 5, and one is needed for the answer: shorten the prompt"
    assert shard.errors == {0: RowError("too_long", message)}
    assert shard.request_of.tolist() == [-1, 0, 1]
    assert shard.requests.max_tokens.tolist() == [1, 3]
    assert shard.num_input_tokens.tolist() == [5, 4, 2]


def test_bad_rows_have_errors_and_the_others_requests(tokenizer: Tokenizer) -> None:
    shard = shard_of([None, "a", "", "b"], tokenizer, params=[None, '{"top_k": -1}', "{", None])
    assert {row: error.kind for row, error in shard.errors.items()} == {
        0: "null_prompt",
        1: "parameters",
        2: "null_prompt",
    }
    assert shard.request_of.tolist() == [-1, -1, -1, 0]
    assert shard.num_input_tokens.tolist() == [0, 2, 0, 2]


def test_a_chat_that_renders_to_nothing_is_an_error(chatty: Tokenizer) -> None:
    shard = shard_of(["a"], chatty, chat=True, chat_template_kwargs={"chat_template": ""})
    assert shard.errors == {0: RowError("null_prompt", "prompt has no tokens")}


def test_equal_greedy_rows_share_one_request(tokenizer: Tokenizer) -> None:
    shard = shard_of(["a", "b", "a", "b", "a"], tokenizer)
    assert shard.request_of.tolist() == [0, 1, 0, 1, 0]
    assert len(shard.requests) == 2


def test_equal_sampled_rows_share_a_request_only_with_a_seed(tokenizer: Tokenizer) -> None:
    sampled = {"temperature": 1.0}
    seeded = {"temperature": 1.0, "seed": 1}
    shard = shard_of(
        ["a"] * 6, tokenizer, params=[sampled, seeded, sampled, seeded, {"temperature": 1, "seed": 2}, None]
    )
    assert shard.request_of.tolist() == [0, 1, 2, 1, 3, 4]
    requests = shard.requests
    assert [requests.params[i].seed for i in requests.params_index] == [None, 1, None, 2, None]


def test_rows_that_differ_in_parameters_alone_are_kept_apart(tokenizer: Tokenizer) -> None:
    shard = shard_of(["a", "a"], tokenizer, params=[{"max_tokens": 3}, {"max_tokens": 4}])
    assert shard.request_of.tolist() == [0, 1]
    assert shard.requests.max_tokens.tolist() == [3, 4]


def test_no_rows_make_no_requests(tokenizer: Tokenizer) -> None:
    shard = shard_of([], tokenizer)
    assert len(shard.requests) == 0
    assert shard.requests.offsets.tolist() == [0]
    assert shard.request_of.tolist() == []


def test_only_bad_rows_make_no_requests(tokenizer: Tokenizer) -> None:
    shard = shard_of([None], tokenizer)
    assert len(shard.requests) == 0
    assert shard.request_of.tolist() == [-1]


def test_a_missing_parameter_column_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"^the sampling-parameters column 'x' is not in the input"):
        build_shard(
            pa.table({"p": ["a"]}),
            PromptSource(prompt="p"),
            sampling=SamplingParams(),
            sampling_column="x",
            tokenizer=tokenizer,
            context_length=10,
            vocabulary=258,
        )


def test_running_an_instruct_model_raw_is_said_once(tokenizer: Tokenizer, chatty: Tokenizer) -> None:
    assert shard_of(["a", "b"], chatty).notes == (
        "prompts are run raw although chatty has a chat template: use chat=True (--chat) to apply it",
    )
    assert shard_of(["a"], chatty, chat=True).notes == ()
    assert shard_of(["a"], tokenizer).notes == ()


ROWS = st.lists(
    st.tuples(
        st.none() | st.text("ab", max_size=4),
        st.sampled_from([None, {}, {"temperature": 1}, {"temperature": 1, "seed": 3}, {"max_tokens": 2}, "["]),
    ),
    max_size=30,
)


@given(ROWS)
@settings(max_examples=60)
def test_rows_share_a_request_exactly_when_a_dictionary_says_so(
    tokenizer: Tokenizer, rows: list[tuple[str | None, dict[str, Any] | str | None]]
) -> None:
    base = SamplingParams(max_tokens=10)
    known: dict[object, int] = {}
    expected = []
    for row, (prompt, given_params) in enumerate(rows):
        if not prompt or len(prompt) == 4 or isinstance(given_params, str):  # four letters and <s> fill the context
            expected.append(-1)
            continue
        params = SamplingParams.from_mapping(given_params or {}, base)
        repeatable = params.greedy or params.seed is not None
        expected.append(known.setdefault((prompt, params, None if repeatable else row), len(known)))
    shard = shard_of([prompt for prompt, _ in rows], tokenizer, params=[params for _, params in rows], context_length=5)
    assert shard.request_of.tolist() == expected
    assert len(shard.requests) == len(known)
    assert sorted(shard.errors) == [row for row, request in enumerate(expected) if request < 0]
    for row, request in enumerate(expected):
        if request >= 0:
            prompt = rows[row][0]
            assert prompt is not None
            assert tokens_of(shard, request) == tokenizer.encode([prompt], special_tokens=True).tokens.tolist()
            assert shard.requests.max_tokens[request] == min(
                shard.requests.params[shard.requests.params_index[request]].max_tokens, 5 - len(prompt) - 1
            )


def test_many_equal_rows_are_one_request(tokenizer: Tokenizer) -> None:
    shard = shard_of(["the same prompt"] * 20_000, tokenizer)
    assert len(shard.requests) == 1
    assert not shard.request_of.any()


def _simulated(table: pa.Table, tokenizer: Tokenizer) -> RowRequests:
    """Requests of a table whose column `n` says how long answers are, of 7 tokens at most."""
    return build_shard(
        table,
        PromptSource(prompt="p"),
        sampling=SamplingParams(max_tokens=7),
        sampling_column=None,
        tokenizer=tokenizer,
        context_length=100,
        vocabulary=258,
        recorded_column="n",
    )


def test_recorded_lengths_may_be_of_any_integers(tokenizer: Tokenizer) -> None:
    table = pa.table({"p": ["a", "b", "c"], "n": pa.array([2**64 - 1, 3, None], pa.uint64())})
    shard = _simulated(table, tokenizer)
    assert shard.requests.recorded.tolist() == [7, 3, 7]


def test_equal_rows_share_a_request_only_where_their_recorded_lengths_agree(tokenizer: Tokenizer) -> None:
    table = pa.table({"p": ["a", "a", "a", "a", "a", "b"], "n": [3, 5, 3, None, 9, 5]})
    shard = _simulated(table, tokenizer)
    assert shard.requests.recorded[shard.request_of].tolist() == [3, 5, 3, 7, 7, 5]
    assert len(shard.requests) == 4
