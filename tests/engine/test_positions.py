"""A row's answer depends on neither its neighbours nor how its prompt is cut, whatever its rotary embeddings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from llmbatch.engine.cpu.engine import CpuEngine
from llmbatch.engine.cpu.platform import HOST
from llmbatch.engine.model.config import describe_model
from llmbatch.engine.model.loader import load_model
from llmbatch.errors import ParameterError
from llmbatch.scheduler.admission_order import FromFront
from tests.support.families import EOS, PAD, TABLE
from tests.support.golden import Golden, generate
from tests.support.models import tiny_model_folder

MAX_TOKENS = 12
ORIGINAL = 32  # tokens of the context that the model had before it was extended
LENGTHS = (3, 12, 19, 20, 21, 31, 32, 33, 34, 50)  # before, at and beyond it, with and without the answer


def rows() -> list[list[int]]:
    """Rows of these lengths; all but two begin alike."""
    rng = np.random.default_rng(7)
    shared: list[int] = rng.integers(0, 256, 16).tolist()
    return [
        (rng.integers(0, 256, length).tolist() if i in (3, 7) else [*shared, *rng.integers(0, 256, length).tolist()])[
            :length
        ]
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A model with short and long factors that differ much, and its folder."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0, 1.1, 1.2],
        "long_factor": [1.5, 3.0, 6.0, 9.0],
        "original_max_position_embeddings": ORIGINAL,
    }
    fields: dict[str, Any] = {**TABLE["phi3_long"].config().to_dict(), "rope_parameters": parameters}
    config = Phi3Config(**{**fields, "original_max_position_embeddings": ORIGINAL})
    torch.manual_seed(0)
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("longrope")
    model.save_pretrained(folder)
    return str(folder), model


def answers(folder: str, context_length: int | None, given: list[list[int]], step_tokens: int) -> list[list[int]]:
    loaded = load_model(folder, dtype="float32", context_length=context_length, platform=HOST)
    golden = Golden(given, MAX_TOKENS, page_size=4, spare_pages=12)
    return golden.run(CpuEngine(loaded, num_pages=golden.num_pages, page_size=4), FromFront(), step_tokens)


def expected(model: Any, given: list[list[int]]) -> list[list[int]]:
    return generate(model, given, [MAX_TOKENS] * len(given), [EOS], PAD)


def test_rows_beyond_the_original_context_are_those_of_generate(longrope: tuple[str, Any]) -> None:
    folder, model = longrope
    given = [row for row in rows() if len(row) > ORIGINAL]
    assert len(given) == 3
    assert answers(folder, None, given, step_tokens=7) == expected(model, given)


def test_rows_within_a_context_that_was_asked_for_are_those_of_generate(longrope: tuple[str, Any]) -> None:
    folder, model = longrope
    given = [row for row in rows() if len(row) + MAX_TOKENS <= ORIGINAL]
    assert len(given) == 4
    assert answers(folder, ORIGINAL, given, step_tokens=7) == expected(model, given)


def test_both_contexts_give_other_answers(longrope: tuple[str, Any]) -> None:
    folder, _ = longrope
    given = [row for row in rows() if len(row) + MAX_TOKENS <= ORIGINAL]
    assert answers(folder, None, given, step_tokens=64) != answers(folder, ORIGINAL, given, step_tokens=64)


@pytest.mark.parametrize("context_length", [None, ORIGINAL])
def test_rows_of_longrope_do_not_depend_on_their_neighbours(
    longrope: tuple[str, Any], context_length: int | None
) -> None:
    folder, _ = longrope
    alone = [answers(folder, context_length, [row], step_tokens=64)[0] for row in rows()]
    for step_tokens in (3, 64):
        assert answers(folder, context_length, rows(), step_tokens) == alone


@pytest.mark.parametrize("name", ["dynamic", "yarn", "llama4", "ministral3"])
def test_rows_do_not_depend_on_their_neighbours(tmp_path: Path, name: str) -> None:
    folder = tiny_model_folder(tmp_path, name)
    alone = [answers(folder, None, [row], step_tokens=64)[0] for row in rows()]
    for step_tokens in (3, 64):
        assert answers(folder, None, rows(), step_tokens) == alone


def test_the_user_is_told_which_frequencies_short_rows_get(longrope: tuple[str, Any]) -> None:
    folder, _ = longrope
    told = (
        "rotary embeddings are those for contexts beyond 32 tokens, in rows of any length; context_length=32 "
        "(--context-length 32) takes those for shorter ones."
    )
    assert told in load_model(folder, dtype="float32", platform=HOST).notes
    assert told not in load_model(folder, dtype="float32", context_length=32, platform=HOST).notes


def test_a_context_may_be_shorter_than_the_models_and_not_longer(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "llama")
    assert describe_model(folder).context_length == 512
    assert describe_model(folder, context_length=100).context_length == 100
    with pytest.raises(ParameterError) as caught:
        describe_model(folder, context_length=513)
    assert str(caught.value) == "context_length must be at most 512, the model's, got 513"
