"""What rows ask for beyond one greedy text, against transformers' own processors, scores and logits."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor, LogitsProcessorList

import llmbatch
from llmbatch.inference.answers import columns as answer_columns
from llmbatch.inference.answers.columns import AnswerColumns
from tests.support.models import EOS, FAMILIES, PAD, tiny_model, tiny_model_folder

TEXTS = ["abc abd", "hello there", "abc abd abe", "zz", "the quick brown fox", "a"]
NEW = 12


class Penalty(LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers has not."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def folder(family: str) -> str:
        return tiny_model_folder(tmp_path_factory.mktemp(family), family)

    return folder


def ids_of(folder: str, text: str) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def ask(folder: str, texts: list[str] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", dtype="float32", device="cpu", kv_memory=2**24, max_tokens=NEW, **options
    )
    rows: list[dict[str, Any]] = op(pa.table({"text": texts})).to_pylist()
    return rows


def truth(model: Any, ids: list[int], processors: list[Any] | None = None, **config: Any) -> Any:
    untyped: Any = GenerationConfig
    settings = untyped(
        do_sample=False, max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=PAD, output_logits=True,
        return_dict_in_generate=True, **config,
    )  # fmt: skip  # arguments in groups
    given = torch.tensor([ids])
    return model.generate(
        given,
        attention_mask=torch.ones_like(given),
        generation_config=settings,
        logits_processor=LogitsProcessorList(processors or []),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_penalties_bias_and_least_tokens_are_those_of_transformers(folders: Any, family: str) -> None:
    folder, model = folders(family), tiny_model(family)
    bias = {7: 3.0, 9: -4.0}
    rows = ask(
        folder, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=bias, min_tokens=6,
        logprobs=0,
    )  # fmt: skip  # arguments in groups
    for text, row in zip(TEXTS, rows, strict=True):
        ids = ids_of(folder, text)
        out = truth(
            model,
            ids,
            [Penalty(len(ids), 0.4, 0.3)],
            repetition_penalty=1.3,
            min_new_tokens=6,
            sequence_bias={(token,): value for token, value in bias.items()},
        )
        assert [one["token_id"] for one in row["logprobs"]] == out.sequences[0, len(ids) :].tolist()


# The others have a decoder elsewhere, or divide states before their head.
@pytest.mark.parametrize("family", [*FAMILIES, "llama4", "llama4_images", "opt", "minicpm3"])
def test_log_probabilities_are_those_of_the_models_logits(folders: Any, family: str) -> None:
    folder, model = folders(family), tiny_model(family)
    rows = ask(folder, logprobs=3, prompt_logprobs=2)
    for text, row in zip(TEXTS, rows, strict=True):
        ids = ids_of(folder, text)
        out = truth(model, ids)
        expected = torch.cat(out.logits).log_softmax(-1)
        check(row["logprobs"], out.sequences[0, len(ids) :].tolist(), expected, likely=3)
        with torch.no_grad():
            whole = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        check(row["prompt_logprobs"], ids[1:], whole[:-1], likely=2)


def check(told: list[dict[str, Any]], tokens: list[int], expected: torch.Tensor, *, likely: int) -> None:
    """Compare what is told of tokens with log-probabilities [tokens, vocabulary]."""
    assert [one["token_id"] for one in told] == tokens
    for one, token, row in zip(told, tokens, expected, strict=True):
        assert one["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(likely)
        assert [each["logprob"] for each in one["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompts_in_chunks_beside_others_that_are_told_of_more_are_told_of_as_alone(folders: Any) -> None:
    texts, asked = [letter * 40 for letter in "abcdef"], [4, 0, 0, 2, 0, 4]
    op: Any = llmbatch.LLMOperator(
        model=folders("llama"), prompt="text", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24,
        max_tokens=1, step_tokens=24,
    )  # fmt: skip  # arguments in groups
    rows = op(pa.table({"text": texts, "how": [{"prompt_logprobs": likely} for likely in asked]})).to_pylist()
    model = tiny_model("llama")
    for text, likely, row in zip(texts, asked, rows, strict=True):
        ids = ids_of(folders("llama"), text)
        with torch.no_grad():
            whole = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert [len(one["top"]) for one in row["prompt_logprobs"]] == [likely] * 39
        check(row["prompt_logprobs"], ids[1:], whole[:-1], likely=likely)
        assert row["attempts"] == 1


def test_what_is_told_of_many_tokens_comes_in_pieces(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": 3, "prompt_logprobs": 2}
    expected = ask(folders("llama"), **options)
    made: list[int] = []
    build = AnswerColumns._build

    def counting(columns: AnswerColumns, window: Any, rows: Any, answers: Any) -> pa.RecordBatch:
        made.append(len(rows))
        return build(columns, window, rows, answers)

    monkeypatch.setattr(answer_columns, "_TOLD_AT_ONCE", 100)
    monkeypatch.setattr(AnswerColumns, "_build", counting)
    assert ask(folders("llama"), **options) == expected
    assert len(made) > 2
    assert sum(made) == len(TEXTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_continuations_are_those_of_the_models_logits(folders: Any, family: str) -> None:
    folder, model = folders(family), tiny_model(family)
    texts = [[" abd", " x", " a longer one"], [" there"], ["q", "q"], [" z"], [" jumps"], ["b", "cd"]]
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", continuation="more", dtype="float32", device="cpu", kv_memory=2**24
    )
    answered = op(pa.table({"text": TEXTS, "more": texts})).to_pylist()
    for text, parts, row in zip(TEXTS, texts, answered, strict=True):
        assert row["generated_text"] is None
        for at, part in enumerate(parts):
            before, ids = ids_of(folder, text), ids_of(folder, text + part)
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            rows = range(len(before), len(ids))
            expected = sum(float(logits[i - 1, ids[i]]) for i in rows)
            assert row["continuation_logprob"][at] == pytest.approx(expected, abs=1e-4)
            assert row["num_continuation_tokens"][at] == len(rows)
            assert row["continuation_is_greedy"][at] == all(int(logits[i - 1].argmax()) == ids[i] for i in rows)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])  # the last two learn a position for each token
def test_a_text_is_scored_that_has_a_token_more_than_the_context(folders: Any, family: str) -> None:
    text, more = "abcde-fgh-" * 51 + "x", "yz"
    op: Any = llmbatch.LLMOperator(
        model=folders(family), prompt="text", continuation="more", dtype="float32", device="cpu", kv_memory=2**24
    )
    row = op(pa.table({"text": [text], "more": [more]})).to_pylist()[0]
    ids = ids_of(folders(family), text + more)
    assert len(ids) == 513
    with torch.no_grad():
        logits = tiny_model(family)(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    expected = float(logits[-2, ids[-2]] + logits[-1, ids[-1]])
    assert (row["error"], row["attempts"]) == (None, 1)
    assert row["continuation_logprob"] == pytest.approx(expected, abs=1e-4)


def test_draws_are_those_of_rows_with_the_seeds_that_follow(folders: Any) -> None:
    folder = folders("llama")
    drawn = ask(folder, n=4, temperature=1.0, seed=11)
    alone = [ask(folder, temperature=1.0, seed=11 + draw) for draw in range(4)]
    for at, row in enumerate(drawn):
        assert [choice["text"] for choice in row["choices"]] == [rows[at]["generated_text"] for rows in alone]
        assert row["generated_text"] == row["choices"][0]["text"]
    assert len({choice["text"] for row in drawn for choice in row["choices"]}) > len(TEXTS)


def test_draws_without_a_seed_differ_and_greedy_ones_do_not(folders: Any) -> None:
    drawn = ask(folders("llama"), n=8, temperature=1.0)
    assert all(len({choice["text"] for choice in row["choices"]}) > 1 for row in drawn)
    greedy = ask(folders("llama"), n=3)
    assert all(len(row["choices"]) == 3 and len({c["text"] for c in row["choices"]}) == 1 for row in greedy)


def test_rows_may_ask_for_different_numbers_of_answers(folders: Any) -> None:
    params = [{"n": 1}, {"n": 3, "temperature": 1.0}, {"n": 2, "logprobs": 1}]
    op: Any = llmbatch.LLMOperator(
        model=folders("llama"), prompt="text", sampling_params="how", dtype="float32", device="cpu", kv_memory=2**24,
        max_tokens=4,
    )  # fmt: skip  # arguments in groups
    rows = op(pa.table({"text": TEXTS[:3], "how": params})).to_pylist()
    assert [len(row["choices"]) for row in rows] == [1, 3, 2]
    assert [row["logprobs"] is None for row in rows] == [True, True, False]


def test_a_stop_token_ends_an_answer_but_not_before_the_least_tokens(folders: Any) -> None:
    folder = folders("llama")
    free = [[one["token_id"] for one in row["logprobs"]] for row in ask(folder, logprobs=0, ignore_eos=True)]
    stop = free[0][3]
    for row, tokens in zip(ask(folder, logprobs=0, ignore_eos=True, stop_token_ids=[stop]), free, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else NEW
        assert [one["token_id"] for one in row["logprobs"]] == tokens[:end]
        assert row["finish_reason"] == ("stop" if stop in tokens else "length")
    longer = ask(folder, ignore_eos=True, stop_token_ids=[stop], min_tokens=8)
    assert min(row["num_generated_tokens"] for row in longer) >= 8


def test_a_token_that_is_too_unlikely_is_never_drawn(folders: Any) -> None:
    greedy = ask(folders("llama"))
    drawn = ask(folders("llama"), temperature=1.0, min_p=1.0)
    assert [row["generated_text"] for row in drawn] == [row["generated_text"] for row in greedy]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {"100000": 1.0}}, "logit_bias must name tokens below 260, the vocabulary's size, got 100000"),
        ({"stop_token_ids": [4000]}, "stop_token_ids must name tokens below 260, the vocabulary's size, got 4000"),
    ],
)
def test_tokens_that_are_not_there_are_refused_and_the_rows_error(
    folders: Any, given: dict[str, Any], message: str
) -> None:
    options: Any = {"model": folders("llama"), "prompt": "text", "dtype": "float32", "device": "cpu"}
    rows = {"text": ["a", "b"], "sampling": [json.dumps(given), None]}
    with pytest.raises(llmbatch.ParameterError) as caught:
        llmbatch.LLMOperator(**options, **given)(pa.table(rows))
    assert str(caught.value) == message
    one: Any = llmbatch.LLMOperator(**options, sampling_params="sampling", max_tokens=2, kv_memory=2**24)
    assert one(pa.table(rows))["error"].to_pylist() == [message, None]


@pytest.mark.parametrize(
    ("texts", "message"),
    [([None], "continuation is null"), ([""], "continuation is empty"), ([[]], "continuation is empty")],
)
def test_what_cannot_be_scored_is_the_rows_error(folders: Any, texts: list[Any], message: str) -> None:
    kind = pa.list_(pa.string()) if isinstance(texts[0], list) else pa.string()
    op: Any = llmbatch.LLMOperator(
        model=folders("llama"), prompt="text", continuation="more", dtype="float32", device="cpu", kv_memory=2**24
    )
    row = op(pa.table({"text": ["a"], "more": pa.array(texts, kind)})).to_pylist()[0]
    assert (row["error"], row["error_kind"]) == (message, "null_prompt")
    assert row["continuation_logprob"] is None


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"n": 3}, "3"),
        ({"structured_outputs": {"regex": "a"}}, "'regex'"),
        ({"logprobs": 0}, "0"),
        ({"prompt_logprobs": 2}, "2"),
    ],
    ids=["n", "form", "logprobs", "prompt_logprobs"],
)
def test_what_scores_do_not_have_is_refused_of_texts_that_are_scored(folders: Any, given: Any, got: str) -> None:
    message = f"{next(iter(given))} must be left out with continuation, got {got}: "
    options: Any = {
        "model": folders("llama"), "prompt": "text", "continuation": "text", "dtype": "float32", "device": "cpu",
        "kv_memory": 2**24,
    }  # fmt: skip  # arguments in groups
    with pytest.raises(llmbatch.ParameterError) as caught:
        llmbatch.LLMOperator(**options, **given)(pa.table({"text": ["a"]}))
    assert str(caught.value).startswith(message)
    by_row: Any = llmbatch.LLMOperator(**options, sampling_params="how")
    bad, good = by_row(pa.table({"text": ["a", "b"], "how": [json.dumps(given), None]})).to_pylist()
    assert (bad["error_kind"], bad["error"].startswith(message)) == ("parameters", True)
    assert good["error"] is None


def test_numbers_cannot_be_scored(folders: Any) -> None:
    op: Any = llmbatch.LLMOperator(model=folders("llama"), prompt="text", continuation="more", device="cpu")
    message = "^the continuation column must hold texts, lists of texts or token ids, but 'more' is int64$"
    with pytest.raises(llmbatch.DataError, match=message):
        op(pa.table({"text": ["a"], "more": [1]}))


def test_token_ids_are_scored_as_they_are(folders: Any) -> None:
    folder = folders("llama")
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", continuation="more", dtype="float32", device="cpu", kv_memory=2**24
    )
    by_text = op(pa.table({"text": ["abc"], "more": [" q"]})).to_pylist()[0]
    ids = ids_of(folder, "abc q")[len(ids_of(folder, "abc")) :]
    by_ids = op(pa.table({"text": ["abc"], "more": [np.array(ids)]})).to_pylist()[0]
    assert by_ids["continuation_logprob"] == pytest.approx(by_text["continuation_logprob"], abs=1e-6)
