"""Tokens that a form forces are not sampled, and no answer changes by that."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import llmbatch
from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.grammars import Grammars
from llmbatch.scheduler.output import FinishReason, ForcedTokens, Step, StepResult
from llmbatch.scheduler.preemption import preempt
from llmbatch.scheduler.scheduler import FinishedSequences, Scheduler
from llmbatch.structured import Structure
from tests.support.models import tiny_config

VOCABULARY = 420
TEXT = 'the name of a person, {"name": "Ada", "home_town": "Zürich"}, person, internationalisation, perhaps, the names'
COMPACT = {"whitespace_flexible": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "internationalisation": {"enum": ["perhaps", "person", "yes"]},
        "home_town": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "internationalisation", "home_town"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
CHOICE = {"choice": ["the name of a person", "perhaps the names", "internationalisation"]}
REGEX = {"regex": "(the person named )?[0-9]{2} of Zürich(, and the name)?"}
JSON = {"json": PERSON}
PARAMETERS: list[dict[str, Any]] = [
    *({"structured_outputs": form} for form in (JSON, CHOICE, REGEX)),
    *({"structured_outputs": form, "temperature": 1.0, "seed": seed} for form in (JSON, CHOICE) for seed in range(4)),
    *({"structured_outputs": JSON, "max_tokens": most} for most in range(1, 14)),
    *({"structured_outputs": CHOICE, "temperature": 1.0, "seed": 1, "max_tokens": most} for most in (2, 3)),
    *({"structured_outputs": JSON, "stop": [stop]} for stop in ("nam", '":"', "alis", "ion", "never")),
    {"structured_outputs": JSON, "stop_token_ids": [TEXT.index("t")], "min_tokens": 6},
    {"structured_outputs": JSON, "min_tokens": 12, "temperature": 0.7, "seed": 3},
    {"structured_outputs": JSON, "presence_penalty": 1.5, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"structured_outputs": JSON, "logprobs": 2},
    {},
]


def spelling_tokenizer() -> Tokenizer:
    """A tokenizer that has several spellings of most texts."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, min_frequency=1, special_tokens=["<eos>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip  # arguments in groups
    core.train_from_iterator([TEXT] * 3, trainer)
    return core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("forced")
    config: Any = tiny_config("llama")
    config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id = VOCABULARY, 0, 1, None
    torch.manual_seed(3)
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(made)
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=spelling_tokenizer(), eos_token="<eos>", pad_token="<pad>").save_pretrained(made)
    return str(made)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that engines compute."""
    done: list[Step] = []
    execute = CpuEngine.execute

    def noted(self: CpuEngine, step: Step) -> StepResult:
        done.append(step)
        return execute(self, step)

    monkeypatch.setattr(CpuEngine, "execute", noted)
    return done


def ask(folder: str, params: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    table = pa.table(
        {"text": [f"the name {i}" for i in range(len(params))], "how": [json.dumps(one) for one in params]}
    )
    op: Any = llmbatch.LLMOperator(
        model=folder, prompt="text", sampling_params="how", dtype="float32", device="cpu",
        **{"kv_memory": 2**22, "max_tokens": 80, **options},
    )  # fmt: skip  # arguments in groups
    rows: list[dict[str, Any]] = op(table).to_pylist()
    return rows


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every token be sampled."""
    monkeypatch.setattr(Grammars, "forced", lambda *_: [])


def preempting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the pages of an answer that was begun away, after every third step."""
    commit = Scheduler.commit

    def noted(self: Scheduler, step: Step, result: StepResult) -> FinishedSequences:
        finished = commit(self, step, result)
        run = self.state.run
        begun = [slot for slot in run.running.tolist() if run.slots[slot].known > run.slots[slot].prompt]
        if begun and self.steps % 3 == 0:
            preempt(self.state, begun[self.steps % len(begun)], float(self.steps))
        return finished

    monkeypatch.setattr(Scheduler, "commit", noted)


@pytest.mark.parametrize("preempted", [False, True])
def test_answers_are_those_of_sampling_one_token_at_a_time(
    folder: str, preempted: bool, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    if preempted:
        preempting(monkeypatch)
    found = ask(folder, PARAMETERS, n=2)
    assert all(row["error"] is None for row in found)
    assert preempted == any(step.recomputed_tokens for step in steps)
    sampled = sum(int(step.samples.sum()) for step in steps)
    steps.clear()
    one_at_a_time(monkeypatch)
    assert ask(folder, PARAMETERS, n=2) == found
    assert sampled < 0.8 * sum(int(step.samples.sum()) for step in steps)


def test_a_forced_text_takes_one_step_and_none_where_it_ends_the_answer(folder: str, steps: list[Step]) -> None:
    [row] = ask(folder, [{"structured_outputs": {"regex": "the name of a person: [0-9] perhaps"}}])
    assert row["generated_text"].startswith("the name of a person: ")
    assert row["num_generated_tokens"] > 6
    sampled = sum(int(step.samples.sum()) for step in steps)
    assert sampled < row["num_generated_tokens"] / 2
    assert sampled == len(steps)


def test_a_row_whose_log_probabilities_are_told_samples_each_token(folder: str, steps: list[Step]) -> None:
    [row] = ask(folder, [{"structured_outputs": CHOICE, "logprobs": 1}])
    assert sum(int(step.samples.sum()) for step in steps) == row["num_generated_tokens"]
    assert len(row["logprobs"]) == row["num_generated_tokens"]


# --- what is forced


@cache
def vocabulary() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(str(spelling_tokenizer().to_str()), n_vocab=VOCABULARY, eos_token=0)


WORDS = st.lists(st.sampled_from([*TEXT.split(), "Zürich", "漢", " ", "[x]", "9"]), min_size=1, max_size=4).map(
    " ".join
)
FORMS = st.one_of(
    st.lists(WORDS, min_size=1, max_size=4, unique=True).map(lambda texts: Structure.of({"choice": texts})),
    st.tuples(WORDS, WORDS).map(lambda pair: Structure.of({"regex": f"({_quoted(pair[0])}|[ab])?{_quoted(pair[1])}"})),
    st.tuples(WORDS, WORDS, st.booleans()).map(lambda given: Structure.of({"json": _schema(*given)})),
)


def _quoted(text: str) -> str:
    return text.translate({ord(one): "\\" + one for one in "[]{}."})


def _schema(name: str, value: str, flexible: bool) -> dict[str, Any]:
    properties = {name: {"enum": [value, value + "s"]}, "the " + name: {"type": "boolean"}}
    guidance = {"x-guidance": {"whitespace_flexible": flexible}}
    return {"type": "object", "properties": properties, "required": list(properties), **guidance}


@given(FORMS, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_token_is_forced_where_the_mask_allows_no_other_and_each_behind_it_likewise(
    form: Structure, random: Any
) -> None:
    from llguidance import LLMatcher

    state = LLMatcher(vocabulary(), form.grammar(), log_level=0)
    waiting: list[int] = []
    for _ in range(80):
        if state.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little"))
        forced = state.compute_ff_tokens()
        assert bool(forced) == (len(allowed) == 1)
        assert not forced or forced[0] == allowed[0]
        assert not waiting or forced == waiting
        token = int(random.choice(allowed.tolist()))
        waiting = forced[1:]
        assert state.consume_token(token)
    assert not state.is_error()


def test_tokens_of_a_step_are_listed_with_forced_ones_behind_those_that_were_sampled() -> None:
    forced = ForcedTokens(np.array([2, 0, 1], np.int32), np.array([5, 6, 7], np.int32))
    result = StepResult(np.array([1, 2, 3], np.int32), np.array([0, FinishReason.STOP, 0], np.uint8), forced=forced)
    requests, tokens, finished = result.all_tokens(np.array([8, 9, 4], np.int32))
    assert requests.tolist() == [8, 8, 8, 9, 4, 4]
    assert tokens.tolist() == [1, 5, 6, 2, 3, 7]
    assert finished.tolist() == [0, 0, 0, FinishReason.STOP, 0, 0]
