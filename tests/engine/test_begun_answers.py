"""An answer that goes on from some of its tokens is the answer that nothing interrupted, however it is sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.loader import LoadedModel, load_model
from llmbatch.preprocess.request_batch import RequestBatch
from llmbatch.preprocess.sampling_params import SamplingParams
from llmbatch.scheduler.admission_order import Blend, FromFront
from tests.support.golden import Golden, prompts
from tests.support.models import save_with_tokenizer, tiny_model

MAX_TOKENS = 24
KINDS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS),
    "drawn": SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0),
    "of a seed": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, top_k=40, seed=3),
    "repetition": SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=1.3),
    "presence": SamplingParams(max_tokens=MAX_TOKENS, presence_penalty=1.0, frequency_penalty=0.5),
    "min_tokens": SamplingParams(
        max_tokens=MAX_TOKENS, temperature=1.0, min_tokens=10, stop_token_ids=tuple(range(40))
    ),
    "stop": SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, stop=("ab", "cde", "xy", "ghg", "f")),
}


def letters(tokens: NDArray[np.int32]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens.tolist())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_with_tokenizer(tiny_model("llama"), tmp_path_factory.mktemp("begun"))
    return load_model(folder, dtype="float32", platform=HOST)


def engine_of(loaded: LoadedModel, golden: Golden) -> CpuEngine:
    return CpuEngine(loaded, num_pages=golden.num_pages, page_size=golden.page_size, decode=letters)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_an_answer_goes_on_from_any_of_its_tokens(loaded: LoadedModel, params: SamplingParams) -> None:
    rows, rng = prompts(), np.random.default_rng(2)
    golden = Golden(rows, MAX_TOKENS, page_size=4, spare_pages=2)
    golden.requests = replace(golden.requests, params=(params,))
    whole = golden.run(engine_of(loaded, golden), FromFront(), 16)
    cuts = [int(rng.integers(0, len(answer))) for answer in whole]
    index = np.flatnonzero(cuts).astype(np.int32)
    assert len(index) > 5
    begun = [whole[i][: cuts[i]] for i in range(len(rows))]
    rest = Golden([row + start for row, start in zip(rows, begun, strict=True)], MAX_TOKENS, 4, spare_pages=2)
    rest.requests = golden.requests.going_on(index, [np.array(begun[i], np.int32) for i in index])
    assert rest.run(engine_of(loaded, rest), Blend(0.1, 0.2), 7) == whole
    assert rest.preemptions > 0


def test_more_tokens_than_there_was_room_for_go_on(loaded: LoadedModel) -> None:
    rows, most = prompts()[:3], 150
    golden = Golden(rows, most, page_size=4)
    golden.requests = replace(golden.requests, params=(SamplingParams(max_tokens=most, ignore_eos=True),))
    whole = golden.run(engine_of(loaded, golden), FromFront(), 16)
    begun = [np.array(answer[:140], np.int32) for answer in whole]
    rest = Golden([row + start.tolist() for row, start in zip(rows, begun, strict=True)], most, 4)
    rest.requests = golden.requests.going_on(np.arange(3, dtype=np.int32), begun)
    assert rest.run(engine_of(loaded, rest), FromFront(), 1000) == whole


def test_requests_that_go_on_have_their_tokens_behind_the_prompt(loaded: LoadedModel) -> None:
    batch = Golden([[1, 2], [3], [4, 5, 6]], 8, 4).requests
    on = batch.going_on(np.array([2, 0], np.int32), [np.array([9], np.int32), np.array([7, 8], np.int32)])
    assert tokens_of(on) == [[1, 2, 7, 8], [3], [4, 5, 6, 9]]
    assert on.begun.tolist() == [2, 0, 1]
    assert (on.max_tokens + on.begun).tolist() == [8, 8, 8]
    assert on.scored.tolist() == on.prompt_lengths.tolist()
    assert [on.begun_tokens(i).tolist() for i in range(3)] == [[7, 8], [], [9]]
    taken = RequestBatch.concatenate([on.take(np.array([2, 1])), on.with_spare(1, 4)])
    assert taken.begun.tolist() == [1, 0, 2, 0, 1, 0]


def tokens_of(requests: RequestBatch) -> list[list[int]]:
    return [one.tolist() for one in np.split(requests.tokens, requests.offsets[1:-1])]
